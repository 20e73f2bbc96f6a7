"""The protocol between replicas and the router: snapshots of replicas, and the names of programs and prefix blocks.

A replica publishes a `ReplicaSnapshot` about once a second, as bytes among Ray's routing statistics. A program's name
has four bytes, that of a prefix block eight, so that a snapshot of a thousand programs stays below 20 kB.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

ROUTING_STATS_KEY = "caesura"
"""The key of a snapshot's bytes in Ray's routing statistics."""

PREFIX_BLOCK_TOKENS = 64
"""Tokens of a prefix block, by which replicas with a cached prefix are found."""
PREFIX_BLOCK_BYTES = 256
"""Bytes of a prefix block of text: four a token."""
MAX_PREFIX_BLOCKS = 128
"""Leading blocks of a prompt that are named; the rest of the prompt is the program's own."""
MAX_PREFIXES = 1024
"""Blocks that a snapshot names: first those that several programs share, then others, most recently used first."""

_NAME_WIDTH, _BLOCK_WIDTH = "I", "Q"

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
"""Finite and not negative, so that arithmetic needs no checks."""


@dataclass(frozen=True, slots=True)
class Home:
    """A program's home: the replica that the program is bound to, which has its KV."""

    replica: str
    """Ray Serve's unique id of the replica."""
    epoch: int
    """Grows with each move. A replica refuses turns with an older epoch (the store's fencing number)."""


class StepCosts(msgspec.Struct, frozen=True):
    """The router's part of a replica's `replicas.cost_model.CostModel`: seconds a token, sequence or step."""

    overhead_s: Amount
    sequence_s: Amount
    weights_s: Amount
    token_s: Amount
    context_s: Amount
    swap_token_s: Amount

    def decode_step_s(self, sequences: float, context_tokens: float) -> float:
        """Time of an iteration that decodes one token for each sequence; ``context_tokens`` is the sum of contexts."""
        linear = max(self.weights_s, sequences * self.token_s)
        return self.overhead_s + sequences * self.sequence_s + linear + context_tokens * self.context_s


class ReplicaSnapshot(msgspec.Struct, frozen=True):
    """A replica's state. Lengths in tokens, times in seconds."""

    replica: str
    """Ray Serve's unique id of the replica."""
    model: str
    number: Count
    """Counts this replica's snapshots. A snapshot with the same number is the same one."""
    draining: bool
    """No new program comes here, and those that are here leave at their next pause."""
    costs: StepCosts
    kv_tokens: Count
    """Tokens whose KV fits the device memory."""
    free_tokens: Count
    """Tokens that no request owns; the prefix cache may still use them."""
    held_tokens: Count
    """KV of paused programs on hold."""
    host_tokens: Count
    """Capacity of the host tier; 0: there is none."""
    host_used_tokens: Count
    running: Count
    """Turns in the batch."""
    waiting: Count
    """Turns that wait for admission, without those put off."""
    running_tokens: Count
    """KV of the running turns."""
    waiting_tokens: Count
    """Prompt tokens that these waiting turns and the running ones still need computed."""
    output_tokens: Amount
    """Tokens that these are still expected to generate."""
    programs: Count
    """Programs that are bound here, each weighted by its probability to have another turn."""
    working_set_tokens: Amount
    """Expected KV of the programs that run, wait without being put off, or come back within the refill time
    (`CostModel.refill_s`)."""
    resume_tokens: tuple[tuple[Amount, Amount], ...]
    """Of the paused programs: (within so many seconds, tokens that those expected back by then will need computed)."""
    turn_output_tokens: Amount
    """Mean output of a turn here."""
    turn_new_tokens: Amount
    """Mean prompt growth of a turn after the first."""
    program_turns: Amount
    """Mean turns of a program."""
    pause_s: Amount
    """Mean pause."""
    working_set_programs: Amount = 0.0
    """Number of programs in `working_set_tokens`."""
    active_tokens: Amount = 0.0
    """Expected KV of the programs that take part in the next iterations: that run, wait without being put off, or come
    back within seconds (`replicas.routing_view.ACTIVE_WITHIN_S`)."""
    active_programs: Amount = 0.0
    """Number of programs in `active_tokens`."""
    put_off: Count = 0
    """Turns that wait behind all others: the replica runs them when no other turn waits."""
    guards_memory: bool = False
    """Its policy protects the memory from thrashing, however many programs come."""
    residents: bytes = b""
    """`pack_names` of the programs that are bound here; of very many, the most recently active ones."""
    on_device: bytes = b""
    """Residents whose KV is mostly in device memory: running, held, or released and still cached."""
    on_host: bytes = b""
    """Residents whose KV is mostly in the host tier."""
    prefixes: bytes = b""
    """Packed names of prefix blocks that are likely cached here, see `pack_blocks`."""

    def encode(self) -> bytes:
        """The bytes to publish."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, packed: bytes) -> "ReplicaSnapshot":
        """The inverse. All numbers are finite and not negative, all names are whole.

        Raises:
            ValueError: these bytes are no snapshot.
        """
        try:
            snapshot = _DECODER.decode(packed)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"not a replica's snapshot: {error}") from error
        names = len(snapshot.residents) | len(snapshot.on_device) | len(snapshot.on_host)
        if names % array(_NAME_WIDTH).itemsize or len(snapshot.prefixes) % array(_BLOCK_WIDTH).itemsize:
            raise ValueError("not a replica's snapshot: a name is cut short")
        return snapshot


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ReplicaSnapshot)


def program_name(key: str) -> int:
    """The four-byte name of a program in snapshots. Of 10,000 programs, two share a name in one of 85 snapshots."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=4).digest(), "little")


_resident_name = lru_cache(maxsize=16384)(program_name)
"""Cached, since every snapshot names all residents."""


def pack_names(keys: Iterable[str]) -> bytes:
    """Programs, for a snapshot."""
    return array(_NAME_WIDTH, sorted({_resident_name(key) for key in keys})).tobytes()


def unpack_names(packed: bytes) -> frozenset[int]:
    """The names in `pack_names`' answer.

    Raises:
        ValueError: not whole names.
    """
    return frozenset(_unpacked(_NAME_WIDTH, packed))


def pack_blocks(blocks: Iterable[int]) -> bytes:
    """Names of prefix blocks, for a snapshot."""
    return array(_BLOCK_WIDTH, blocks).tobytes()


def unpack_blocks(packed: bytes) -> frozenset[int]:
    """The names in `pack_blocks`' answer.

    Raises:
        ValueError: not whole names.
    """
    return frozenset(_unpacked(_BLOCK_WIDTH, packed))


def prefix_blocks(prompt: Sequence[int] | bytes, salt: str = "") -> tuple[int, ...]:
    """Names of a prompt's leading whole blocks; equal names mean equal beginnings up to there (they are chained).

    Args:
        prompt: token ids, or the text as bytes.
        salt: prompts of different salts share nothing.
    """
    if isinstance(prompt, bytes):
        data, width = prompt[: MAX_PREFIX_BLOCKS * PREFIX_BLOCK_BYTES], PREFIX_BLOCK_BYTES
    else:
        data = array("q", prompt[: MAX_PREFIX_BLOCKS * PREFIX_BLOCK_TOKENS]).tobytes()
        width = PREFIX_BLOCK_TOKENS * 8
    return tuple(_chained(data, width, blake2b(salt.encode("utf-8", "surrogatepass")).digest() if salt else b""))


def salt_of(body: Mapping[str, Any]) -> str:
    """The salt of a request's prefix blocks: vLLM's `cache_salt`, which separates equal prefixes."""
    salt = body.get("cache_salt")
    return salt if isinstance(salt, str) else ""


def prompt_of(body: Mapping[str, Any]) -> Sequence[int] | bytes:
    """The beginning of a request's prompt, for `prefix_blocks`: its tools and messages, or its `prompt`.

    An invalid prompt counts as empty, since the replica rejects the request.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, list):
        ids = prompt[: MAX_PREFIX_BLOCKS * PREFIX_BLOCK_TOKENS]
        return ids if all(isinstance(one, int) and 0 <= one < 2**63 for one in ids) else b""
    room, parts = MAX_PREFIX_BLOCKS * PREFIX_BLOCK_BYTES, []
    messages = body.get("messages")
    for part in (body.get("tools") or (), *(messages if isinstance(messages, list) else ())):
        if room <= 0:
            break
        try:
            parts.append(_JSON.encode(part))
        except (TypeError, ValueError, OverflowError):  # lone surrogates, integers beyond 64 bits
            break
        room -= len(parts[-1])
    return b"".join(parts)


_JSON = msgspec.json.Encoder(order="sorted")


def _chained(data: bytes, width: int, name: bytes) -> Iterator[int]:
    for start in range(0, len(data) - width + 1, width):
        name = blake2b(data[start : start + width], digest_size=8, key=name).digest()
        yield int.from_bytes(name, "little")


def _unpacked(width: str, packed: bytes) -> "array[int]":
    names = array(width)
    names.frombytes(packed)
    return names
