"""Faults of the disk tier's volume, on the real CPU engine: no wrong token, no hang, and a name for what is wrong."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.v1.core.sched.interface import PauseState

from replicas.control import dispatch
from replicas.disk_tier.chunk_file import ChunkFiles
from replicas.disk_tier.tier import Direction
from replicas.disk_tier.trouble import Trouble
from tests.contracts.disk_engines import CONTEXT, FAST_S, Engine, Failing, Hanging, engine_on

pytestmark = pytest.mark.engine

CHUNKS = 9


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Engine]:
    with engine_on(tmp_path_factory.mktemp("volume") / "kv", tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def turns(shared_engine: Engine) -> tuple[list[int], list[int]]:
    """What the two turns of a program generate without any cache."""
    first = shared_engine.turn("alone", CONTEXT)
    shared_engine.empty(disk=True)
    second = shared_engine.second("alone", first, last=True)
    assert shared_engine.numbers()["context_tokens"]["disk"] == 0
    return first, second


@pytest.fixture
def engine(shared_engine: Engine, turns: tuple[list[int], list[int]]) -> Iterator[Engine]:
    """The engine with empty tiers, on a volume that works."""
    shared_engine.empty(disk=True)
    yield shared_engine
    disk = shared_engine.disk
    disk._files = ChunkFiles(disk._files.direct)
    disk._stopped.clear()
    disk.read_speed.chunk_s = FAST_S
    shared_engine.settle()
    disk.chunks.check_integrity()


def flip(files: list[Path]) -> None:
    with files[3].open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 4]))


def cut(files: list[Path]) -> None:
    with files[3].open("r+b") as file:
        file.truncate(5000)


def exchange(files: list[Path]) -> None:
    files[3].write_bytes(files[4].read_bytes())


def empty(files: list[Path]) -> None:
    files[3].write_bytes(bytes(files[3].stat().st_size))


@pytest.mark.parametrize("damage", [flip, cut, exchange, empty])
def test_a_damaged_chunk_is_recognised_deleted_and_computed_again(
    engine: Engine, turns: tuple[list[int], list[int]], damage: Callable[[list[Path]], None]
) -> None:
    assert engine.turn("p", CONTEXT) == turns[0]
    order = {
        key.hex(): place for place, key in enumerate(engine.scheduler.swapping.cache.chunks.accounts["default/p"].keys)
    }
    files = sorted(engine.files(), key=lambda file: order[file.stem])
    assert len(files) == CHUNKS
    damage(files)
    engine.empty()
    before = engine.numbers()
    assert engine.second("p", turns[0]) == turns[1]
    after = engine.numbers()
    assert after["disk_troubles"]["damaged"] - before["disk_troubles"]["damaged"] == 1
    assert after["context_tokens"]["disk"] - before["context_tokens"]["disk"] == 3 * 32, "the chunks before it"
    assert len(engine.files()) == 11, "it was written again in the next pause"
    engine.empty()
    assert engine.second("p", turns[0]) == turns[1]
    assert engine.numbers()["disk_troubles"]["damaged"] == after["disk_troubles"]["damaged"]


@pytest.mark.parametrize(
    ("number", "name"),
    [(errno.ENOSPC, "full"), (errno.EROFS, "read_only"), (errno.EIO, "io_error"), (errno.ESTALE, "gone")],
)
def test_a_volume_that_cannot_be_written_is_named_and_tried_again(
    engine: Engine, turns: tuple[list[int], list[int]], number: int, name: str
) -> None:
    engine.disk._files = Failing(number)
    assert engine.turn("p", CONTEXT) == turns[0]
    numbers = engine.numbers()
    assert numbers["disk_degraded"][name] == 1
    assert numbers["disk_used_tokens"] == 0
    engine.empty()
    assert engine.second("p", turns[0]) == turns[1]
    assert engine.numbers()["disk_writes"]["stopped"] - numbers["disk_writes"]["stopped"] == 1, (
        "not tried at each pause"
    )
    if name == "gone":  # a new slot is locked when the volume is back
        engine.disk._janitor.wake()
        engine.until(lambda: engine.disk._writes)
    engine.disk._files = ChunkFiles(direct=False)
    engine.disk._stopped = {direction: (trouble, 0.0) for direction, (trouble, _) in engine.disk._stopped.items()}
    engine.empty()
    engine.turn("q", CONTEXT)
    assert engine.numbers()["disk_used_tokens"] == CHUNKS * 32
    assert not any(engine.numbers()["disk_degraded"].values())


def test_a_volume_that_cannot_be_read_is_named_and_the_context_is_computed(
    engine: Engine, turns: tuple[list[int], list[int]]
) -> None:
    engine.turn("p", CONTEXT)
    engine.empty()
    engine.disk._files = Failing(errno.EIO)
    assert engine.second("p", turns[0]) == turns[1]
    assert engine.disk._stopped[Direction.READ][0] is Trouble.IO_ERROR
    assert not engine.disk.readable


def test_a_volume_that_hangs_delays_a_turn_by_half_a_second(engine: Engine, turns: tuple[list[int], list[int]]) -> None:
    engine.turn("p", CONTEXT)
    engine.empty()
    opened = threading.Event()
    engine.disk._files = Hanging(opened)
    threading.Timer(3.0, opened.set).start()
    before = engine.numbers()
    assert engine.second("p", turns[0]) == turns[1]
    after = engine.numbers()
    assert after["disk_troubles"]["too_late"] - before["disk_troubles"]["too_late"] == 1
    assert after["context_tokens"]["disk"] == before["context_tokens"]["disk"]
    assert opened.is_set(), "the end of the load is awaited before its memory is used again"


def test_a_volume_that_is_slower_than_computing_is_not_used(engine: Engine, turns: tuple[list[int], list[int]]) -> None:
    engine.turn("p", CONTEXT)
    engine.empty()
    engine.disk.read_speed.chunk_s = 1.0
    before = engine.numbers()
    assert engine.second("p", turns[0]) == turns[1]
    after = engine.numbers()
    assert after["context_tokens"]["disk"] == before["context_tokens"]["disk"]
    assert after["disk_writes"]["no_gain"] - before["disk_writes"]["no_gain"] == 1


def test_a_volume_that_is_gone_is_not_replaced_by_what_is_under_its_mount_point(
    engine: Engine, turns: tuple[list[int], list[int]]
) -> None:
    engine.turn("p", CONTEXT)
    engine.empty()
    path = engine.disk._slots.path
    path.rename(path.with_name("away"))
    assert engine.second("p", turns[0]) == turns[1]
    engine.disk._janitor.wake()
    engine.until(lambda: engine.numbers()["disk_degraded"]["gone"] == 1)
    assert not path.exists()
    path.with_name("away").rename(path)
    engine.disk._janitor.wake()
    engine.until(lambda: engine.disk._writes)
    engine.empty()
    engine.disk.read_speed.chunk_s = FAST_S
    before = engine.numbers()["context_tokens"]["disk"]
    assert engine.second("p", turns[0]) == turns[1]
    assert engine.numbers()["context_tokens"]["disk"] - before == CHUNKS * 32


def test_the_files_of_a_program_are_deleted_when_it_ends_and_kept_when_it_moves(
    engine: Engine, turns: tuple[list[int], list[int]]
) -> None:
    engine.turn("moves", CONTEXT)
    engine.scheduler.swapping.moves("default/moves")
    engine.scheduler.swapping.forget("default/moves")
    engine.disk._janitor.wait()
    assert len(engine.files()) == CHUNKS
    engine.empty()
    assert engine.second("p", turns[0], last=True) == turns[1]
    assert engine.numbers()["context_tokens"]["disk"] > 0
    engine.empty()
    engine.turn("ends", [5] * 200)
    assert len(engine.files()) == CHUNKS + 6
    engine.turn("ends", [5] * 230, last=True)
    engine.disk._janitor.wait()
    assert len(engine.files()) == CHUNKS


def test_after_a_reset_nothing_is_loaded_that_was_written_before(
    engine: Engine, turns: tuple[list[int], list[int]]
) -> None:
    engine.turn("p", CONTEXT)
    files = {file: file.read_bytes() for file in engine.files()}
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.disk._janitor.wait()
    assert not engine.files()
    for file, content in files.items():  # another replica has the same
        file.write_bytes(content)
    before = engine.numbers()["context_tokens"]["disk"]
    assert engine.second("p", turns[0]) == turns[1]
    assert engine.numbers()["context_tokens"]["disk"] == before
    engine.disk._slots.generation = ""


def test_a_reset_does_not_wait_for_a_volume_that_hangs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    engine.disk._files = Hanging(opened)
    with monkeypatch.context() as unsettled:
        unsettled.setattr(engine, "settle", lambda: None)
        engine.turn("p", CONTEXT)
    engine.until(lambda: engine.disk.in_use)
    timer = threading.Timer(10.0, opened.set)
    timer.start()
    refused = dispatch(engine.scheduler, "reset", {})
    assert not opened.is_set(), "the engine's thread waited for the volume"
    assert refused == {"reset": False, "reason": "copies to or from the disk are under way"}
    assert dispatch(engine.scheduler, "settle", {}) == {"settled": False, "steps": False}, "new weights wait"
    assert not opened.is_set()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not engine.scheduler.has_requests(), "a pause does not wait"
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    timer.cancel()
    opened.set()
    engine.settle()
    assert dispatch(engine.scheduler, "reset", {}) == {"reset": True}
