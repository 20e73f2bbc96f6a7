"""Shortens a tool's answer that does not fit into the model's context window.

The replica finds how much fits, because it has the tokenizer. The log of the run keeps the whole answer and this
number, so that every reader of the log makes the same text again.
"""


def shortened(text: str, chars: int) -> str:
    """Return the first and the last characters of ``text``, ``chars`` together, and a note for the model between them.

    A text that is not longer is returned as it is.
    """
    left_out = len(text) - chars
    if left_out <= 0:
        return text
    tail = chars // 2
    why = "because it does not fit in the model's context"
    note = f"[... {left_out:,} characters of this answer were left out, {why} ...]"
    return f"{text[: chars - tail]}\n{note}\n{text[len(text) - tail :]}"
