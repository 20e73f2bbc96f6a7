"""What a replica's memory is used for. A replica has 63 usable blocks of 16 tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.program import Hints, ProgramIdentity
from replicas.control import snapshot
from replicas.kv_use import LOOKED_AT, KvUse, cached_blocks
from replicas.virtual_engine import VirtualEngine

Replica = Callable[..., VirtualEngine]


@dataclass
class Block:
    ref_cnt: int
    block_hash: bytes | None


def identity(program: str) -> ProgramIdentity:
    return ProgramIdentity(program_id=program, hints=Hints(expected_tool="ls"))


def test_every_block_is_of_one_kind(replica: Replica) -> None:
    engine = replica("continuum", default_ttl_s=100.0, max_ttl_s=100.0)
    assert KvUse.of(engine.scheduler) == KvUse(running=0, held=0, cached=0, empty=63)
    engine.submit("a1", range(1000, 1100), 1, identity("a"))
    engine.run()
    # 100 prompt tokens and one that was generated, whose KV was never computed: 7 blocks, held.
    assert KvUse.of(engine.scheduler) == KvUse(running=0, held=7, cached=0, empty=56)
    engine.submit("b1", range(2000, 2060), 50, identity("b"))
    engine.step()
    assert KvUse.of(engine.scheduler) == KvUse(running=4, held=7, cached=0, empty=52)


def test_what_is_given_back_stays_cached_until_somebody_needs_it(replica: Replica) -> None:
    engine = replica("vllm")
    engine.submit("a1", range(1000, 1100), 1, identity("a"))
    engine.run()
    # Of its seven blocks six were full: only those can be found again.
    assert KvUse.of(engine.scheduler) == KvUse(running=0, held=0, cached=6, empty=57)
    assert snapshot(engine.scheduler)["cached_blocks"] == 6  # type: ignore[arg-type]
    engine.submit("b1", range(3000, 3000 + 60 * 16), 5)
    engine.step()
    assert KvUse.of(engine.scheduler).cached == 3


def test_of_a_large_pool_a_part_is_looked_at() -> None:
    pool = [Block(n % 2, b"known" if n % 4 < 2 else None) for n in range(3 * LOOKED_AT)]
    assert abs(cached_blocks(pool) - len(pool) / 4) / len(pool) < 0.02
