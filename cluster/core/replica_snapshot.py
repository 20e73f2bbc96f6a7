"""The protocol between replicas and the router: snapshots of replicas, and the names of programs and prefix blocks.

A replica publishes a `ReplicaSnapshot` about once a second, as bytes among Ray's routing statistics. The name of a
program has four bytes and that of a prefix block eight, so that a snapshot of a thousand programs has less than 20 kB.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Any, Protocol

import msgspec

ROUTING_STATS_KEY = "caesura"
"""The key of a snapshot's bytes in Ray's routing statistics."""

PREFIX_BLOCK_TOKENS = 64
"""Tokens of a prefix block. Replicas with a cached prefix are found by the names of such blocks."""
PREFIX_BLOCK_BYTES = 256
"""Bytes of a prefix block of text, at four bytes a token."""
MAX_PREFIX_BLOCKS = 128
"""Maximum number of leading blocks of a prompt that get names. The rest of a prompt is assumed not to be shared."""
MAX_PREFIXES = 1024
"""Maximum number of blocks in a snapshot. Blocks that several programs share come first, then others, the most recently
used first."""

_NAME_WIDTH, _BLOCK_WIDTH = "I", "Q"

TAKES_ALL_S = 1e6
"""`ReplicaSnapshot.shed_from_s` of a replica that takes all programs."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
"""A finite number that is not negative, so that arithmetic needs no checks."""


@dataclass(frozen=True, slots=True)
class Home:
    """A program's home: the replica that the program is bound to, which has its KV."""

    replica: str
    """Ray Serve's unique id of the replica."""
    epoch: int
    """The store's fencing number, which grows with each migration. A replica rejects turns with an older epoch."""


class StepCosts(msgspec.Struct, frozen=True):
    """The part of a replica's `replicas.cost_model.CostModel` that the router uses: seconds per token, sequence or
    step.
    """

    overhead_s: Amount
    sequence_s: Amount
    weights_s: Amount
    token_s: Amount
    context_s: Amount
    """For each token of a decode's context: to read its KV, and to attend to it."""
    swap_token_s: Amount

    def decode_step_s(self, sequences: float, context_tokens: float) -> float:
        """Return the time of an iteration that decodes one token for each sequence (seconds).

        Args:
            sequences: number of sequences in the batch.
            context_tokens: sum of the sequences' context lengths, in tokens.
        """
        linear = max(self.weights_s, sequences * self.token_s)
        return self.overhead_s + sequences * self.sequence_s + linear + context_tokens * self.context_s


class TokenCosts(Protocol):
    """Seconds of a token's work, as `StepCosts` and `replicas.cost_model.CostModel` have them."""

    @property
    def token_s(self) -> float:
        """Of each token that is computed."""
        ...

    @property
    def sequence_s(self) -> float:
        """Of each token that is generated, in addition."""
        ...

    @property
    def context_s(self) -> float:
        """Of each token that is generated, for each token before it."""
        ...


def program_work_s(costs: TokenCosts, computed_tokens: float, outputs: float, context_tokens: float) -> float:
    """Return the seconds of a replica that a program takes. Reading the weights is not counted: batches share it.

    Args:
        costs: costs of the replica's steps.
        computed_tokens: tokens of its prompts that are computed.
        outputs: tokens that it generates.
        context_tokens: mean length of its context meanwhile.
    """
    decode_s = costs.token_s + costs.sequence_s + context_tokens * costs.context_s
    return computed_tokens * costs.token_s + outputs * decode_s


class ReplicaSnapshot(msgspec.Struct, frozen=True):
    """The state of a replica. Lengths are in tokens, times in seconds."""

    replica: str
    """Ray Serve's unique id of the replica."""
    model: str
    number: Count
    """Sequence number of the snapshot. Two snapshots of a replica with the same number are the same snapshot."""
    draining: bool
    """Whether the replica is draining: it gets no new programs, and its programs migrate at their next pause."""
    costs: StepCosts
    kv_tokens: Count
    """Number of tokens whose KV fits the device memory."""
    free_tokens: Count
    """KV capacity that no request owns. The prefix cache may still use it."""
    held_tokens: Count
    """KV of paused programs on hold."""
    host_tokens: Count
    """Capacity of the host tier; 0: there is no host tier."""
    host_used_tokens: Count
    running: Count
    """Number of turns in the batch."""
    waiting: Count
    """Number of turns that wait for admission, without those in `put_off`."""
    running_tokens: Count
    """KV of the running turns."""
    waiting_tokens: Count
    """Prompt tokens that are still to be computed for the turns in `waiting` and `running`."""
    output_tokens: Amount
    """Tokens that the turns in `waiting` and `running` are still expected to generate."""
    programs: Count
    """Number of programs that are bound to this replica, each weighted by its probability to have another turn."""
    working_set_tokens: Amount
    """Expected KV of the programs that run, wait without being put off, or come back within the refill time
    (`CostModel.refill_s`)."""
    resume_tokens: tuple[tuple[Amount, Amount], ...]
    """Pairs (seconds, tokens) about paused programs: the tokens that will have to be computed for those that are
    expected to resume within so many seconds."""
    turn_output_tokens: Amount
    """Mean output of a turn on this replica."""
    turn_new_tokens: Amount
    """Mean prompt growth of a turn after the first."""
    program_turns: Amount
    """Mean number of turns of a program."""
    pause_s: Amount
    """Mean pause between two turns of a program."""
    working_set_programs: Amount = 0.0
    """Number of programs in `working_set_tokens`."""
    active_tokens: Amount = 0.0
    """Expected KV of the programs that take part in the next iterations: those that run, wait without being put off, or
    come back within `replicas.routing_view.ACTIVE_WITHIN_S`."""
    active_programs: Amount = 0.0
    """Number of programs in `active_tokens`."""
    put_off: Count = 0
    """Number of turns that the replica runs only when no other turn waits."""
    shed_from_s: Amount = TAKES_ALL_S
    """The replica refuses new programs whose expected work (`program_work_s`) is so many seconds or more."""
    shed_sheddable_from_s: Amount = TAKES_ALL_S
    """As `shed_from_s`, for programs that can wait for all others (`Hints.sheddable`)."""
    shed_retry_after_s: Amount = 0.0
    """Seconds until the turns that wait now are served, if it refuses any."""
    guards_memory: bool = False
    """Whether the replica's policy protects the KV memory from thrashing, whatever the number of programs."""
    max_sequences: Count = 256
    """Largest number of turns in a batch."""
    step_time_ratio: Amount = 1.0
    """Time of the replica's steps, divided by that of ``costs``."""
    start_s: Amount = 0.0
    """Seconds from the start of the replica's process until it could serve; 0: unknown."""
    residents: bytes = b""
    """`pack_names` of the programs that are bound to this replica. If there are very many, these are the most recently
    active ones."""
    on_device: bytes = b""
    """`pack_names` of the residents whose KV is mostly in device memory: running, held, or released and still
    cached."""
    on_host: bytes = b""
    """`pack_names` of the residents whose KV is mostly in the host tier."""
    on_disk: bytes = b""
    """`pack_names` of the residents whose KV is mostly on the volume of the disk tier. Other replicas on this volume
    can load it."""
    volume: str = ""
    """Name of the volume of the disk tier, the same for all replicas that see it; empty: there is none to read from."""
    disk_token_s: Amount = 0.0
    """Measured seconds to read one token's KV from the volume."""
    prefixes: bytes = b""
    """`pack_blocks` of the prefix blocks that are probably cached on this replica."""

    def encode(self) -> bytes:
        """Encode the snapshot as msgpack."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, packed: bytes) -> "ReplicaSnapshot":
        """Decode what `encode` wrote. All numbers of the result are finite and not negative, and all names are
        complete.

        Raises:
            ValueError: these bytes are not a snapshot.
        """
        try:
            snapshot = _DECODER.decode(packed)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"not a replica's snapshot: {error}") from error
        names = len(snapshot.residents) | len(snapshot.on_device) | len(snapshot.on_host) | len(snapshot.on_disk)
        if names % array(_NAME_WIDTH).itemsize or len(snapshot.prefixes) % array(_BLOCK_WIDTH).itemsize:
            raise ValueError("not a replica's snapshot: a name is cut short")
        return snapshot


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ReplicaSnapshot)


def program_name(key: str) -> int:
    """Return the four-byte name of a program in snapshots.

    Names can collide. With 10,000 programs, one snapshot in 85 has two programs of the same name.
    """
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=4).digest(), "little")


_resident_name = lru_cache(maxsize=16384)(program_name)
"""`program_name` with a cache, since every snapshot names all residents."""


def pack_names(keys: Iterable[str]) -> bytes:
    """Pack the names of programs for a snapshot."""
    return array(_NAME_WIDTH, sorted({_resident_name(key) for key in keys})).tobytes()


def unpack_names(packed: bytes) -> frozenset[int]:
    """Unpack the names that `pack_names` packed.

    Raises:
        ValueError: the last name is cut short.
    """
    return frozenset(_unpacked(_NAME_WIDTH, packed))


def pack_blocks(blocks: Iterable[int]) -> bytes:
    """Pack the names of prefix blocks for a snapshot."""
    return array(_BLOCK_WIDTH, blocks).tobytes()


def unpack_blocks(packed: bytes) -> frozenset[int]:
    """Unpack the names that `pack_blocks` packed.

    Raises:
        ValueError: the last name is cut short.
    """
    return frozenset(_unpacked(_BLOCK_WIDTH, packed))


def prefix_blocks(prompt: Sequence[int] | bytes, salt: str = "") -> tuple[int, ...]:
    """Return the names of a prompt's leading complete blocks.

    A block's name is a hash of the block and of the name before it. Prompts with an equal name are therefore equal up
    to the end of that block.

    Args:
        prompt: token ids, or the text as bytes.
        salt: prompts with different salts have no common names.
    """
    if isinstance(prompt, bytes):
        data, width = prompt[: MAX_PREFIX_BLOCKS * PREFIX_BLOCK_BYTES], PREFIX_BLOCK_BYTES
    else:
        data = array("q", prompt[: MAX_PREFIX_BLOCKS * PREFIX_BLOCK_TOKENS]).tobytes()
        width = PREFIX_BLOCK_TOKENS * 8
    return tuple(_chained(data, width, blake2b(salt.encode("utf-8", "surrogatepass")).digest() if salt else b""))


def salt_of(body: Mapping[str, Any]) -> str:
    """Return the salt of a request's prefix blocks: vLLM's `cache_salt`, and the `model` of a request for an adapter.

    It is empty without either. vLLM's own block hashes have both, since an adapter changes the KV.
    """
    salt, model = body.get("cache_salt"), body.get("model")
    own = salt if isinstance(salt, str) else ""
    return f"{own}\0{model}" if isinstance(model, str) and ":" in model else own


def prompt_of(body: Mapping[str, Any]) -> Sequence[int] | bytes:
    """Return the beginning of a request's prompt for `prefix_blocks`, from its tools and messages, or from its
    `prompt`.

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
