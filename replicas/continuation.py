"""Continues a prompt from the token ids of its first messages.

The result is the ids of the rest, or the reason why it cannot be done. The text of an assistant's message is not
exactly what was generated. To render a program's messages again gives other ids, and the KV of everything after the
first difference is lost. Here the known ids stay, and only what comes after the assistant's message is rendered and
encoded. Two renderings show where that begins: one of the messages whose ids are known, and one of all messages. If the
second does not begin with the first, the template renders earlier messages differently, and the whole prompt is
rendered again.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from threading import Lock
from typing import Any

from cluster.core.turn import pack_ids, unpack_ids

MARK = "kestrel"
"""The last word of each sample's last known message."""

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Returns the {what}.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for name, what in (("weather", "weather"), ("clock", "time"))
)

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample conversation. ``messages`` makes new messages at each call, because a reader may change them."""

    name: str
    messages: Callable[[], Messages]
    known: int
    """Number of messages whose ids are known. The last of these is the assistant's."""
    tools: tuple[dict[str, Any], ...] = TOOLS


def _user(text: str = "What is the weather like?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _calls(*places: str, **more: Any) -> dict[str, Any]:
    # Nine letters and digits: Mistral's templates take no other call id.
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": TOOLS[number % 2]["function"]["name"], "arguments": json.dumps({"place": place})},
        }
        for number, place in enumerate(places)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def _result(number: int = 0) -> dict[str, Any]:
    name = TOOLS[number % 2]["function"]["name"]
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": "Sunny,\n 21 °C. "}


def _system() -> dict[str, Any]:
    return {"role": "system", "content": "You are helpful."}


def _answer() -> dict[str, Any]:
    return {"role": "assistant", "content": f"It says: {MARK}"}


SAMPLES = (
    Sample("question", lambda: [_user(), _answer(), _user("Sure?")], 2, ()),
    Sample("system", lambda: [_system(), _user(), _answer(), _user("Sure?")], 3, ()),
    Sample("unused tools", lambda: [_system(), _user(), _answer(), _user("Sure?")], 3),
    Sample("tool call", lambda: [_user(), _calls(MARK), _result()], 2),
    Sample("tool call, system", lambda: [_system(), _user(), _calls(MARK), _result()], 3),
    Sample("tool calls", lambda: [_user(), _calls("Ulm", MARK), _result(), _result(1)], 2),
    Sample("content and call", lambda: [_user(), _calls(MARK, content="I look."), _result()], 2),
    Sample("rounds", lambda: [_user(), _calls("Ulm"), _result(), _calls(MARK), _result()], 4),
    Sample(
        "rounds, reasoning",
        lambda: [_user(), _calls("Ulm", reasoning="Hm."), _result(), _calls(MARK, reasoning="So."), _result()],
        4,
    ),
)


Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Renders messages to text. The flag is whether the beginning of the next answer is rendered too."""
Encode = Callable[[str], list[int]]
"""Returns the ids of a text, without any special tokens added."""

ID_BYTES = len(pack_ids([0]))

HEADS = 4096
"""Number of conversation beginnings whose ids are known by their digests. Each takes some hundred bytes."""
DIGEST_BYTES = 32
"""Size of the digests of beginnings and of their ids."""


class Again(StrEnum):
    """The reason why a prompt is rendered again although the ids of its beginning are known."""

    NOT_TEXT = "this model's prompts are not made by a text template"
    UNSTABLE_TEMPLATE = "this chat template does not extend what it wrote before"
    HEAD_CHANGED = "the system message, the tools or the first messages are not those that there are ids of"
    HISTORY_CHANGED = "the chat template writes earlier messages differently now"
    REASONING_LEFT_OUT = "the chat template leaves out reasoning of before the user's new message"
    UNKNOWN_END = "the chat template ends the assistant's message in a way it did not end a sample"
    OTHER_STOP = "the answer ended with the beginning of another message than the one that follows"
    MERGED_TOKENS = "the tokenizer does not keep the end of a message apart from what follows"
    OWN_TEMPLATE = "the request brings a chat template"
    SPECIAL_TOKENS = "the request asks for special tokens beside the chat template's"
    NOT_ONLY_TEXT = "the messages hold more than text"


class Tokens:
    """The properties of a tokenizer and a model that a continuation needs.

    Args:
        encode: returns the ids of a text, without any special tokens added.
        added: the tokens that the tokenizer cuts out of a text before anything else, with their ids.
        stops: the ids that end a generation.
    """

    def __init__(self, encode: Encode, added: Mapping[str, int], stops: frozenset[int]) -> None:
        self.encode = encode
        self.added = added
        self.stops = stops
        self._changing_heads = Lock()  # two threads render prompts
        self._heads: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        """By the digest of a conversation's first messages: the length and the digest of the packed ids of their head.
        The one that was used last is the last."""

    def begins_with_head(self, ids: bytes, text: str) -> bool:
        """Return whether packed ids begin with those of a conversation's first messages, up to their last added token.

        These ids do not depend on what follows. What they are is kept, because every turn of a program asks for the
        same ones.

        Args:
            ids: the packed ids.
            text: the first messages.
        """
        key = _digest(text.encode(errors="surrogatepass"))
        known = self._heads.get(key)
        if known is None:
            head = pack_ids(self.encode(self._head(text)))
            known = (len(head), _digest(head))
        with self._changing_heads:
            self._heads[key] = known
            self._heads.move_to_end(key)
            if len(self._heads) > HEADS:
                self._heads.popitem(last=False)
        length, digest = known
        return _digest(ids[:length]) == digest

    def _head(self, text: str) -> str:
        """Return a text up to the end of its last added token."""
        return text[: max((text.rfind(token) + len(token) for token in self.added if token in text), default=0)]

    def first_stop(self, text: str) -> str | None:
        """Return the stop token with which ``text`` begins, or None if there is none."""
        fitting = [token for token, number in self.added.items() if number in self.stops and text.startswith(token)]
        return max(fitting, key=len, default=None)

    def last_stop(self, text: str) -> int | None:
        """Return the position in ``text`` at which the last stop token begins, or None if there is none."""
        found = [text.rfind(token) for token, number in self.added.items() if number in self.stops]
        return max((position for position in found if position >= 0), default=None)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Examined:
    """How a template rendered the samples."""

    closings: tuple[str, ...]
    """Texts with which it ends an assistant's message, the longest first. Each reaches from the end-of-turn token to
    the end of what belongs to the message, such as a line feed. A text is empty where the first token of the next
    message ends this one, as in GLM's template. There are none if prompts of this template always have to be rendered
    again."""
    faults: tuple[str, ...]
    """Names of the samples that it could render but did not extend."""

    @property
    def stable(self) -> bool:
        """Whether every sample that could be rendered was extended exactly."""
        return bool(self.closings) and not self.faults


class CannotRender(Exception):
    """The template rejected a conversation."""


def examine(render: Callable[[Sample, Sequence[Message], bool], str], tokens: Tokens) -> Examined:
    """Find out whether a template extends what it rendered before, on sample conversations of every shape.

    Args:
        render: as `Render`, with the sample as first argument, whose tools may be called. It raises CannotRender where
            the template rejects the conversation.
        tokens: one of them ends the template's messages.
    """
    closings: set[str] = set()
    faults: list[str] = []
    for sample in SAMPLES:

        def write(messages: Sequence[Message], generation: bool, sample: Sample = sample) -> str:
            return render(sample, messages, generation)

        messages = sample.messages()
        try:
            before, whole = write(messages[: sample.known], False), write(messages, True)
            closing = _closing_of(before, tokens)
            split = None if closing is None else _split(write, before, whole, messages, sample.known, closing, tokens)
            first = _first(write, messages)
        except CannotRender:
            continue
        ids = tokens.encode(whole)
        if (
            closing is None
            or split is None
            or tokens.first_stop(whole[split:]) is None
            or not _has_head(pack_ids(ids), first, tokens)
        ):
            faults.append(sample.name)
        elif tokens.encode(whole[:split]) + (_behind(whole[split:], tokens) or []) != ids:
            return Examined((), (f"{sample.name} (its tokens)",))
        else:
            closings.add(closing)
    return Examined(tuple(sorted(closings, key=len, reverse=True)), tuple(faults))


def rest_of_prompt(
    render: Render, tokens: Tokens, examined: Examined, messages: Sequence[Message], known: int, known_ids: bytes
) -> list[int] | Again:
    """Return the ids that follow those of the first ``known`` messages in the prompt of all ``messages``.

    Args:
        render: renders messages to text.
        tokens: encodes text to ids.
        examined: how this template rendered the samples.
        messages: all messages of the program so far.
        known: number of leading messages that have ids. The last of these is the assistant's.
        known_ids: these ids, at least one, packed. If the last turn was cut, the end-of-turn token is the first id of
            the result.

    Returns:
        The ids, or the reason why the prompt has to be rendered again.
    """
    if not examined.closings:
        return Again.UNSTABLE_TEMPLATE
    if not _has_head(known_ids, _first(render, messages), tokens):
        return Again.HEAD_CHANGED
    before, whole = render(messages[:known], False), render(messages, True)
    if _leaves_out_reasoning(whole, messages, known):
        return Again.REASONING_LEFT_OUT
    closing = next((closing for closing in examined.closings if before.endswith(closing)), None)
    if closing is None:
        return Again.UNKNOWN_END
    split = _split(render, before, whole, messages, known, closing, tokens)
    if split is None:
        return Again.HISTORY_CHANGED
    ids = _behind(whole[split:], tokens)
    if ids is None:
        return Again.MERGED_TOKENS
    [last_id] = unpack_ids(known_ids[-ID_BYTES:])
    if last_id == ids[0]:
        return ids[1:]
    return Again.OTHER_STOP if not closing and last_id in tokens.stops else ids


def _first(render: Render, messages: Sequence[Message]) -> str:
    """Return the text of the messages before the first answer. It is empty if the answer comes first."""
    first = next((number for number, message in enumerate(messages) if message.get("role") == "assistant"), 0)
    return render(messages[:first], False) if first else ""


def _has_head(ids: bytes, first: str, tokens: Tokens) -> bool:
    """Return whether packed ids begin with the head of the first messages, of which there may be none."""
    return not first or tokens.begins_with_head(ids, first)


def _behind(rest: str, tokens: Tokens) -> list[int] | None:
    """Return the ids of ``rest``, from the end-of-turn token on, or None if the tokenizer does not find the token.

    The token is encoded with the text, because a tokenizer may treat the beginning of a text specially.
    """
    end, ids = tokens.first_stop(rest), tokens.encode(rest)
    return None if end is None or ids[:1] != [tokens.added[end]] else ids


def _closing_of(before: str, tokens: Tokens) -> str | None:
    """Return the text after MARK, with which the last message ends, from the last stop token on.

    It is empty if there is no stop token. None: MARK is not in ``before``.
    """
    _, mark, tail = before.rpartition(MARK)
    position = tokens.last_stop(tail)
    return None if not mark else "" if position is None else tail[position:]


def _split(
    render: Render, before: str, whole: str, messages: Sequence[Message], known: int, closing: str, tokens: Tokens
) -> int | None:
    """Return the position in ``whole`` at which the last known message's end-of-turn token begins.

    None: the template renders the earlier messages differently than before.
    """
    if whole.startswith(before):
        return len(before) - len(closing)
    # Some templates write a message that is the last one differently: Qwen 3 puts an empty thought into it.
    words, end = _own_words(messages[known - 1]), tokens.first_stop(closing)
    if words is None or end is None or any(end in text for text in words):
        return None
    past = render(messages[: known - 1], False)
    split = whole.find(end, len(past))
    if split < 0 or not whole.startswith(past) or not whole.startswith(closing, split):
        return None
    return split if words[0].strip() in whole[len(past) : split] else None


def _own_words(message: Message) -> list[str] | None:
    """Return a message's content and its calls, or None if it has reasoning, or content in parts."""
    content = message.get("content") or ""
    if not isinstance(content, str) or message.get("reasoning"):
        return None
    return [content, *(str(call) for call in message.get("tool_calls") or ())]


def _leaves_out_reasoning(whole: str, messages: Sequence[Message], known: int) -> bool:
    if all(message.get("role") != "user" for message in messages[known:]):
        return False
    return any((message.get("reasoning") or "").strip() not in whole for message in messages[:known])
