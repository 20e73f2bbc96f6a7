"""The disk tier on real CPU engines: a program continues on another replica, from the files of the one that is gone."""

from pathlib import Path

import pytest

from replicas.disk_tier.slots import Slots
from tests.contracts.disk_engines import CONTEXT, engine_on

CHUNKS = 9
"""319 of the first turn's 320 tokens have KV: 9 chunks of 32 tokens."""


@pytest.mark.engine
def test_a_program_continues_on_another_replica_with_the_same_tokens(tmp_path: Path, tiny_model: Path) -> None:
    with engine_on(tmp_path, tiny_model) as one:
        first = one.turn("p", CONTEXT)
        assert one.numbers()["disk_writes"]["written"] == 1
        assert one.numbers()["disk_used_tokens"] == CHUNKS * 32
        one.empty()
        one.disk._open = False  # nothing is loaded
        computed = one.second("q", first, last=True)
        assert one.numbers()["context_tokens"]["disk"] == 0
        identity = one.disk._slots.identity
    taken = Slots(tmp_path, identity, 2)
    assert taken.take(create=False)
    assert taken.own == 0, "the slot of the first replica, which another one has taken over"
    with engine_on(tmp_path, tiny_model) as other:
        assert other.disk._slots.own == 1
        assert other.second("p", first) == computed
        assert other.numbers()["context_tokens"]["disk"] == CHUNKS * 32
        assert other.story("p")[0]["disk_tokens"] == CHUNKS * 32
        # A further turn of it is computed with what was loaded, and one of another tenant is not.
        before = other.numbers()["disk_bytes"]["read"]
        other.empty()
        assert other.second("p", first, salt="another") == computed
        assert other.numbers()["disk_bytes"]["read"] == before
    taken.release()
