"""Faults of the disk tier's volume under many programs: no wrong token, no hang, a name, and loads again afterwards.

The short form of each fault is in `tests/contracts/test_disk_tier_faults.py`.
"""

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.disk_tier.chunk_file import ChunkFiles
from tests.contracts.disk_engines import FAST_S, Engine, Failing, engine_on
from tests.faults.promises import Promised

PROGRAMS = 20
SLOW_BYTES_PER_S = 50e6
FAULTS = ("full", "read-only", "slow", "flipped", "gone")


class Slow(ChunkFiles):
    """Files of a volume of 50 MB/s."""

    def write(self, path: Path, key: bytes, chunk: memoryview) -> None:
        time.sleep(len(chunk) / SLOW_BYTES_PER_S)
        super().write(path, key, chunk)

    def read(self, path: Path, key: bytes, into: memoryview) -> None:
        time.sleep(len(into) / SLOW_BYTES_PER_S)
        super().read(path, key, into)


@pytest.fixture(scope="module")
def engine(is_long: bool, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Engine]:
    if not is_long:
        pytest.skip("the short form is a contract test")
    with engine_on(tmp_path_factory.mktemp("volume") / "kv", tiny_model) as engine:
        yield engine


def prompt_of(number: int) -> list[int]:
    return [100 + (number * 31 + place * 7) % 900 for place in range(1500)]


def run(engine: Engine, programs: int) -> tuple[list[list[int]], float]:
    """Run the second turns. Return what they generate, and the seconds of the longest one."""
    answers, longest_s = [], 0.0
    for number in range(programs):
        engine.empty()
        began_s = time.perf_counter()
        answers.append(engine.turn(f"p{number}", prompt_of(number) + [3] * 40, last=False))
        longest_s = max(longest_s, time.perf_counter() - began_s)
    return answers, longest_s


def apply_fault(engine: Engine, fault: str) -> None:
    disk = engine.disk
    if fault in ("full", "read-only"):
        disk._files = Failing(errno.ENOSPC if fault == "full" else errno.EROFS, reads=True)
    elif fault == "slow":
        disk._files = Slow(direct=False)
    elif fault == "flipped":
        for file in engine.files():
            content = bytearray(file.read_bytes())
            content[len(content) // 3] ^= 16
            file.write_bytes(content)
    else:
        disk._slots.path.rename(disk._slots.path.with_name("away"))


def repair(engine: Engine, fault: str) -> None:
    disk = engine.disk
    disk._files = ChunkFiles(direct=False)
    if fault == "gone":
        disk._slots.path.with_name("away").rename(disk._slots.path)
        disk._janitor.wake()
        engine.until(lambda: disk._writes)
    disk._stopped = {direction: (trouble, 0.0) for direction, (trouble, _) in disk._stopped.items()}
    disk.read_speed.chunk_s = disk.write_speed.chunk_s = FAST_S


@pytest.mark.parametrize("fault", FAULTS)
def test_programs_survive_a_fault_of_the_volume(engine: Engine, promised: Promised, fault: str) -> None:
    engine.empty(disk=True)
    engine.disk._open = False
    expected, computed_s = run(engine, PROGRAMS)
    engine.disk._open = True
    engine.empty(disk=True)
    for number in range(PROGRAMS):
        engine.turn(f"p{number}", prompt_of(number))
    before = engine.numbers()
    apply_fault(engine, fault)
    answers, longest_s = run(engine, PROGRAMS)
    after = engine.numbers()
    name = f"disk tier: {fault}"
    wrong = sum(answer != right for answer, right in zip(answers, expected, strict=True))
    promised(name, "turns with a wrong token", wrong, exactly=0)
    promised(name, "longest turn, beyond computing it", max(0.0, longest_s - computed_s), unit="s", at_most=2.0)
    if fault != "slow":  # which is measured, and used or not used
        grown = sum(after["disk_troubles"].values()) - sum(before["disk_troubles"].values())
        promised(name, "failures that were counted under a name", grown, at_least=1)
    repair(engine, fault)
    for number in range(2):
        engine.turn(f"again{number}", prompt_of(number))
    engine.empty()
    loaded = engine.numbers()["context_tokens"]["disk"]
    engine.turn("again0", prompt_of(0) + [3] * 40)
    promised(name, "tokens loaded after the repair", engine.numbers()["context_tokens"]["disk"] - loaded, at_least=1000)
