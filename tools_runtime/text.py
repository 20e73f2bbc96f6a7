"""Makes a tool's output safe for a prompt: it is bounded, and its control characters and special tokens are escaped.

The escape is reversible (`restored`) and visible. Its sign is U+241B, the symbol for escape, which tokenizers do not
remove by normalisation:

    \u241b\u241b     the sign itself
    \u241bxHH    a control character: C0 but tab and line feed, DEL, C1; a CR before an LF stays
    \u241buHHHH  half of a surrogate pair, or a control of writing direction
    \u241b.      nothing; it is put after the first character of a chat-template token, so that it is no token
"""

import re
from collections.abc import Iterable
from functools import lru_cache

SIGN = "\u241b"

KNOWN_TOKENS = (
    "<s>", "</s>", "<bos>", "<eos>", "<pad>", "<unk>", "<mask>",
    "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]",
    "<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<end_function_call>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>",
    "<think>", "</think>", "<function_calls>", "</function_calls>", "[gMASK]", "<sop>",
)  # fmt: skip
"""Tokens of common chat templates. Those of the form <|...|> (with either bar) need no list."""

_MARKED = r"<[|\uff5c][^<>\n]{1,64}[|\uff5c]>"
MARKED_CHARS = 68
"""Largest number of characters of a token of the form <|...|>."""
_ACTING = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
_ESCAPED = re.compile(SIGN + r"(?:" + SIGN + r"|\.|x[0-9a-f]{2}|u[0-9a-f]{4})")


def sanitized(text: str, special_tokens: Iterable[str] = ()) -> str:
    """Escape everything in ``text`` on which a terminal or a chat template would act.

    Args:
        text: any text.
        special_tokens: tokens of the model, beside the known ones. Those of one character cannot be escaped and stay.
    """
    return _acting(tuple(special_tokens)).sub(_escape, text)


def restored(text: str) -> str:
    """Return the inverse of `sanitized`."""
    return _ESCAPED.sub(_unescape, text)


def bounded(text: str, cap_bytes: int, special_tokens: Iterable[str] = ()) -> tuple[str, bool]:
    """Return ``text`` sanitized and cut to ``cap_bytes`` of UTF-8, and whether it was cut.

    Escaping can make a text six times as long. Therefore the result is made piece by piece, and only as much as is
    kept.
    """
    pieces = _Pieces()
    room = cap_bytes
    position = 0
    for match in _acting(tuple(special_tokens)).finditer(text):
        plain, escape = text[position : match.start()], _escape(match)
        needed = _size(plain) + _size(escape)
        if needed > room:
            pieces.add(_beginning(plain, room))
            return pieces.joined(), True
        pieces.add(plain + escape)
        room -= needed
        position = match.end()
    rest = text[position:] if position else text
    kept = _beginning(rest, room)
    cut = len(kept) < len(rest)
    if position == 0:
        return kept, cut
    pieces.add(kept)
    return pieces.joined(), cut


def settled(text: str, special_tokens: Iterable[str] = ()) -> str:
    """Return the beginning of ``text`` that `bounded` escapes in the same way, whatever follows.

    A token of a chat template, or a line end, may have begun at the end of ``text``.
    """
    tokens = tuple(special_tokens)
    firsts, longest = _beginnings(tokens)
    end = next((place for place in range(max(0, len(text) - longest), len(text)) if text[place] in firsts), len(text))
    acting, kept = _acting(tokens), text[:end]
    # A token that is complete in ``text`` must not be cut in two, because its first half is none.
    for place in range(max(0, end - longest), end):
        if text[place] in firsts and acting.match(text, place) and not acting.match(kept, place):
            return text[:place]
    return kept


@lru_cache(maxsize=64)
def _beginnings(special_tokens: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Return the first characters of all that is escaped by what follows, and the largest length of it."""
    tokens = [token for token in (*KNOWN_TOKENS, *special_tokens) if len(token) > 1]
    return frozenset({token[0] for token in tokens} | {"<", "\r"}), max(MARKED_CHARS, *map(len, tokens))


class _Pieces:
    """Text in pieces. Small pieces are joined in groups, because each alone would take ten times its size."""

    def __init__(self) -> None:
        self._joined: list[str] = []
        self._small: list[str] = []

    def add(self, piece: str) -> None:
        self._small.append(piece)
        if len(self._small) == 1000:
            self._joined.append("".join(self._small))
            self._small.clear()

    def joined(self) -> str:
        return "".join((*self._joined, *self._small))


def cut_marker(cap_bytes: int) -> str:
    """Return the text that is added to an answer that was cut."""
    return f"\n[... cut: the answer is longer than {cap_bytes} bytes]"


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _beginning(text: str, room: int) -> str:
    if _size(text) <= room:
        return text
    return text[:room] if text.isascii() else text[:room].encode()[:room].decode(errors="ignore")


@lru_cache(maxsize=64)
def _acting(special_tokens: tuple[str, ...]) -> re.Pattern[str]:
    tokens = sorted({token for token in (*KNOWN_TOKENS, *special_tokens) if len(token) > 1 and SIGN not in token})
    firsts = "".join(sorted({re.escape(token[0]) for token in tokens} | {"<"}))
    rests = "|".join((_MARKED, *map(re.escape, tokens)))
    # One character at a time, each where a token begins: of tokens that overlap, every one is broken.
    return re.compile(f"{SIGN}|{_ACTING}|(?=[{firsts}])(?={rests})(?P<token>.)", re.DOTALL)


def _escape(match: re.Match[str]) -> str:
    sign = match.group()
    if match.lastgroup == "token":
        # The first character of a token may need its own escape, which already breaks the token.
        return sign + SIGN + "."
    if sign == SIGN:
        return SIGN + SIGN
    return f"{SIGN}x{ord(sign):02x}" if ord(sign) < 256 else f"{SIGN}u{ord(sign):04x}"


def _unescape(match: re.Match[str]) -> str:
    code = match.group()[1:]
    if code == SIGN:
        return SIGN
    return "" if code == "." else chr(int(code[1:], 16))
