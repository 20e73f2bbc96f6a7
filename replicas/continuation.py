"""The rest of a prompt, as token ids, after ids that stand for its first messages: exact, or a reason why not.

A chat template is a program, and the text of an assistant's message is not what was generated: to render a program's
messages again gives other ids, and the KV of everything after the first difference is lost. Here the ids stay, and
only what comes after the assistant's end of turn is rendered and encoded. Two renderings, T1 of the messages that the
ids stand for and T2 of all of them, show where that begins; if T2 does not begin with T1, the template writes the past
anew, and so must we.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from replicas.template_samples import MARK, SAMPLES, Sample

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Messages, and whether the beginning of the next answer is written too, to text."""
Encode = Callable[[str], list[int]]
"""Text to ids, without anything added."""


class Again(StrEnum):
    """Why a prompt is rendered again although there are ids to go on from."""

    NOT_TEXT = "this model's prompts are not made by a text template"
    UNSTABLE_TEMPLATE = "this chat template does not extend what it wrote before"
    HISTORY_CHANGED = "the chat template writes earlier messages differently now"
    UNKNOWN_END = "the chat template ends the assistant's message in a way it did not end a sample"
    MERGED_TOKENS = "the tokenizer does not keep the end of a turn apart from what follows"
    OWN_TEMPLATE = "the request brings a chat template"
    SPECIAL_TOKENS = "the request asks for special tokens beside the chat template's"
    NOT_ONLY_TEXT = "the messages hold more than text"


@dataclass(frozen=True, slots=True)
class Closing:
    """How a template ends an assistant's message."""

    text: str
    """From the end-of-turn token to the end of what belongs to the message, such as a line feed."""
    token: str
    token_id: int


@dataclass(frozen=True, slots=True)
class Examined:
    """What a template did with the samples."""

    closings: tuple[Closing, ...]
    """Longest first; empty if this template always has to render again."""
    faults: tuple[str, ...]
    """Of the samples that it could render, those that it did not extend."""

    @property
    def stable(self) -> bool:
        """Whether every sample that could be rendered was extended exactly."""
        return bool(self.closings) and not self.faults


class CannotRender(Exception):
    """A template refuses a conversation."""


def examine(
    render: Callable[[Sample, Sequence[Message], bool], str], encode: Encode, tokens: Mapping[str, int]
) -> Examined:
    """Whether a template extends what it wrote, on sample conversations of every shape that a program takes.

    Args:
        render: as `Render`, with the sample whose tools may be called; raises CannotRender where the template refuses.
        encode: text to ids.
        tokens: the tokenizer's added tokens, and their ids. The template's end-of-turn token is one of them.
    """
    closings: dict[str, Closing] = {}
    faults: list[str] = []
    exact = True
    for sample in SAMPLES:
        try:
            before = render(sample, sample.messages()[: sample.known], False)
            whole = render(sample, sample.messages(), True)
        except CannotRender:
            continue
        closing = closing_of(before, tokens)
        if closing is None or not whole.startswith(before):
            faults.append(sample.name)
        elif not _exact(before, whole, closing, encode):
            faults.append(sample.name)
            exact = False
        else:
            closings[closing.text] = closing
    usable = sorted(closings.values(), key=lambda closing: -len(closing.text)) if exact else []
    return Examined(tuple(usable), tuple(faults))


def closing_of(before: str, tokens: Mapping[str, int]) -> Closing | None:
    """How a text ends whose last message ends in MARK; None if no token of ``tokens`` ends it."""
    _, mark, tail = before.rpartition(MARK)
    found = [(tail.rfind(token), len(token), token) for token in tokens if token and token in tail]
    if not mark or not found:
        return None
    position, _, token = max(found)
    return Closing(tail[position:], token, tokens[token])


def _exact(before: str, whole: str, closing: Closing, encode: Encode) -> bool:
    split = len(before) - len(closing.text) + len(closing.token)
    return encode(whole[:split]) + encode(closing.token + whole[split:])[1:] == encode(whole)


def rest_of_prompt(
    render: Render, encode: Encode, examined: Examined, messages: Sequence[Message], known: int, last_id: int
) -> list[int] | Again:
    """Ids that, put after those of the first ``known`` messages, make the prompt of all ``messages``.

    Args:
        render: messages to text.
        encode: text to ids.
        examined: what is known of the template.
        messages: all of the program so far.
        known: how many of them have ids, from the first; the last of these is the assistant's.
        last_id: the last of these ids. If the turn was cut, the end-of-turn token is the first that is returned.
    """
    if not examined.closings:
        return Again.UNSTABLE_TEMPLATE
    before, whole = render(messages[:known], False), render(messages, True)
    if not whole.startswith(before):
        return Again.HISTORY_CHANGED
    for closing in examined.closings:
        if before.endswith(closing.text):
            rest = whole[len(before) - len(closing.text) + len(closing.token) :]
            # Encoded behind the token, as tokenizers may treat the beginning of a text in a way of its own.
            first, *ids = encode(closing.token + rest)
            if first != closing.token_id:
                return Again.MERGED_TOKENS
            return ids if last_id == closing.token_id else [first, *ids]
    return Again.UNKNOWN_END
