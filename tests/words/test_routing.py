"""The words between replicas and the router: what comes back from the wire, and what does not."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.core.replica_snapshot import (
    PREFIX_BLOCK_TOKENS,
    ReplicaSnapshot,
    StepCosts,
    pack_blocks,
    pack_names,
    prefix_blocks,
    program_name,
    unpack_blocks,
    unpack_names,
)

counts = st.integers(0, 2**62)
amounts = st.floats(0, 1e18)
SNAPSHOTS = st.builds(
    ReplicaSnapshot,
    **{
        name: strategy
        for names, strategy in (
            (("replica", "model"), st.text()),
            (("number", "kv_tokens", "free_tokens", "held_tokens", "host_tokens", "host_used_tokens"), counts),
            (("running", "waiting", "running_tokens", "waiting_tokens", "programs"), counts),
            (("output_tokens", "working_set_tokens", "working_set_programs"), amounts),
            (("active_tokens", "active_programs"), amounts),
            (("turn_output_tokens", "turn_new_tokens"), amounts),
            (("program_turns", "pause_s"), amounts),
            (("draining",), st.booleans()),
            (("costs",), st.builds(StepCosts, *[amounts] * 6)),
            (("resume_tokens",), st.lists(st.tuples(amounts, amounts), max_size=4).map(tuple)),
            (("residents", "on_device", "on_host"), st.lists(st.text()).map(pack_names)),
            (("prefixes",), st.lists(st.integers(0, 2**64 - 1)).map(pack_blocks)),
        )
        for name in names
    },
)
INTACT = ReplicaSnapshot(
    "r", "m", 1, False, StepCosts(1, 1, 1, 1, 1, 1), 9, 9, 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0.0, (), 1.0, 1.0, 1.0, 1.0
)


@given(SNAPSHOTS)
def test_a_snapshot_comes_back_as_it_was(snapshot: ReplicaSnapshot) -> None:
    assert ReplicaSnapshot.decode(snapshot.encode()) == snapshot


@given(st.binary(max_size=400))
def test_junk_is_a_value_error(junk: bytes) -> None:
    with pytest.raises(ValueError):
        ReplicaSnapshot.decode(junk)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_snapshot_is_a_snapshot_or_a_value_error(place: int, byte: int) -> None:
    packed = bytearray(INTACT.encode())
    packed[place % len(packed)] = byte
    try:
        snapshot = ReplicaSnapshot.decode(bytes(packed))
    except ValueError:
        return
    unpack_names(snapshot.residents)
    unpack_blocks(snapshot.prefixes)


def test_nesting_without_end_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        ReplicaSnapshot.decode(b"\x81\xa1x" + b"\x91" * 100_000)


@pytest.mark.parametrize(
    "change",
    [
        {"pause_s": math.nan},
        {"pause_s": math.inf},
        {"pause_s": -1.0},
        {"free_tokens": -1},
        {"resume_tokens": ((1.0, math.nan),)},
        {"costs": StepCosts(math.nan, 1, 1, 1, 1, 1)},
        {"residents": b"123"},
        {"on_device": b"12345"},
        {"prefixes": b"1234"},
        {"replica": 3},
    ],
    ids=str,
)
def test_a_nonsensical_snapshot_is_a_value_error(change: dict[str, Any]) -> None:
    assert ReplicaSnapshot.decode(INTACT.encode()) == INTACT
    with pytest.raises(ValueError):
        ReplicaSnapshot.decode(msgspec.msgpack.encode(replace(INTACT, **change)))


@given(st.lists(st.text(st.characters())))
def test_names_come_back(keys: list[str]) -> None:
    assert unpack_names(pack_names(keys)) == {program_name(key) for key in keys}


@given(st.binary())
def test_names_of_junk_are_names_or_a_value_error(junk: bytes) -> None:
    for unpack, width in ((unpack_names, 4), (unpack_blocks, 8)):
        if len(junk) % width:
            with pytest.raises(ValueError):
                unpack(junk)
        else:
            unpack(junk)


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)), st.integers(0, 4))
def test_blocks_are_equal_as_far_as_the_prompts_are(one: list[int], other: list[int], blocks: int) -> None:
    beginning = [7] * (blocks * PREFIX_BLOCK_TOKENS)
    named, other_named = prefix_blocks(beginning + [1] + one * 64), prefix_blocks(beginning + [2] + other * 64)
    assert named[:blocks] == other_named[:blocks]
    assert not set(named[blocks:]) & set(other_named)
