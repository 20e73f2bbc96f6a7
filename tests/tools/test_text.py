"""What tools say is made harmless, and the escape can be taken back."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tools_runtime.text import KNOWN_TOKENS, SIGN, bounded, restored, sanitized, settled

PIECES = st.sampled_from(
    [
        *KNOWN_TOKENS,
        "<|im_end|>",
        "<\uff5cUser\uff5c>",
        SIGN,
        SIGN + ".",
        SIGN + "x1b",
        "\r\n",
        "\r",
        "\x1b[2J",
        "<",
        "|>",
        "\ud800",
        "abc",
    ]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(st.characters(), max_size=5)), max_size=12).map("".join)


@given(TEXTS)
def test_the_escape_is_reversible(text: str) -> None:
    assert restored(sanitized(text, ["<fancy>"])) == text


@given(TEXTS)
def test_nothing_acts_any_more(text: str) -> None:
    safe = sanitized(text, ["abc"])
    assert not any(token in safe for token in (*KNOWN_TOKENS, "<|im_end|>", "<\uff5cUser\uff5c>", "abc"))
    assert not any(ord(sign) < 32 and sign not in "\n\t\r" for sign in safe)
    assert "\r" not in safe.replace("\r\n", "")
    safe.encode()  # no halves of surrogate pairs


@given(TEXTS, st.integers(0, 60))
def test_a_bounded_text_is_the_beginning_of_the_whole(text: str, cap: int) -> None:
    whole = sanitized(text)
    kept, cut = bounded(text, cap)
    assert whole.startswith(kept)
    assert len(kept.encode()) <= cap
    assert cut == (kept != whole)


@example("<start_function_call><s><s><s><s>[/TOOL_RESULTS]<start_function_call>", "")
@given(TEXTS, TEXTS)
def test_what_is_settled_stays_whatever_follows(text: str, rest: str) -> None:
    known = bounded(settled(text, ["<fancy>", "abc def"]), 10_000, ["<fancy>", "abc def"])[0]
    assert sanitized(text + rest, ["<fancy>", "abc def"]).startswith(known)
    assert settled("x" * 100 + text).startswith("x" * 100)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text\n\twith lines\r\n", "plain text\n\twith lines\r\n"),
        ("<|im_start|>", f"<{SIGN}.|im_start|>"),
        ("a\x00b\x9bc\u202ed", f"a{SIGN}x00b{SIGN}x9bc{SIGN}u202ed"),
        ("<<s>s>", f"<<{SIGN}.s>s>"),
        ("if a <b and c> d: x[0]", "if a <b and c> d: x[0]"),
    ],
)
def test_what_is_escaped_and_what_is_not(text: str, expected: str) -> None:
    assert sanitized(text) == expected


def test_tokens_that_overlap_are_all_broken() -> None:
    assert sanitized("abcd", ["abc", "bcd"]) == f"a{SIGN}.b{SIGN}.cd"
