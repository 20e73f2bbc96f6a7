"""The thread of the disk tier that opens the volume and deletes files, on a volume that fails."""

import errno
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core.clock import MonotonicClock
from replicas.disk_tier.slots import VOLUME_FILE, Slots
from replicas.disk_tier.tier import DiskTier
from replicas.disk_tier.trouble import Direction, Trouble
from tests.replica.test_disk_tier import context, stored, tier_on, write


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """A tier with room for ten chunks."""
    with tier_on(tmp_path, MonotonicClock()) as made:
        yield made


class Stubborn:
    """Files that cannot be deleted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: set[Path] = set()
        unlink = Path.unlink

        def refused(path: Path, missing_ok: bool = False) -> None:
            if path in self.paths:
                raise OSError(errno.EIO, "input/output error", str(path))
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", refused)


def test_a_file_that_cannot_make_room_does_so_later_and_keeps_no_other_one(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = Stubborn(monkeypatch)
    assert write(tier, 1, "cheap", 6, saved_s=1.0) == 6
    *_, other, last = (tier._slots.own_file(key) for key in context("cheap", 6))
    stubborn.paths = {last}  # the first that makes room
    write(tier, 2, "dear", 6, saved_s=2.0)
    tier._janitor.wait()
    assert not other.exists()
    assert last.exists()
    assert not tier.writable, "it has too many files"
    tier._janitor.wake()
    tier._janitor.wait()
    assert last.exists()
    stubborn.paths.clear()
    tier._janitor.wake()
    tier._janitor.wait()
    assert not last.exists()
    assert not tier._janitor._doomed


def test_a_file_of_a_program_that_has_ended_is_deleted_as_soon_as_it_can_be(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = Stubborn(monkeypatch)
    write(tier, 1, "ends", 4, saved_s=1.0)
    stubborn.paths = {tier._slots.own_file(key) for key in context("ends", 2)}
    tier.forget("ends")
    tier._janitor.wait()
    assert stored(tmp_path) == 2
    stubborn.paths.clear()
    assert write(tier, 2, "ends", 1, saved_s=1.0) == 1
    tier._janitor.wake()
    tier._janitor.wait()
    assert stored(tmp_path) == 1, "the one that was written again"


def test_files_that_were_to_be_deleted_are_left_to_who_has_their_slot(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volume was gone, and another replica may have taken the slot since."""
    stubborn = Stubborn(monkeypatch)
    write(tier, 1, "ends", 4, saved_s=1.0)
    stubborn.paths = {tier._slots.own_file(key) for key in context("ends", 4)}
    tier.forget("ends")
    tier._janitor.wait()
    tier.report_failure(Direction.WRITE, OSError(errno.ESTALE, "stale"))
    tier.take_reports()
    stubborn.paths.clear()
    tier._janitor.wake()
    tier._janitor.wait()
    assert stored(tmp_path) == 4
    tier.take_reports()
    assert len(tier.chunks.blocks) == 4, "this one has found them in its slot"


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"0123", b"0123456789abcdeX", b"0123456789abcdef\n"])
def test_a_damaged_name_of_the_folder_is_replaced_for_all_replicas(tmp_path: Path, content: bytes) -> None:
    one, two = (Slots(tmp_path, "model", 2) for _ in range(2))
    one.folder.mkdir()
    file = one.folder / VOLUME_FILE
    file.write_bytes(content)
    assert one.take(create=True)
    assert two.take(create=False)
    assert re.fullmatch("[0-9a-f]{16}", one.volume)
    assert one.volume == two.volume == file.read_text()
    assert sorted(path.name for path in one.folder.iterdir()) == ["slot-0", "slot-1", VOLUME_FILE]


def test_what_the_thread_does_not_expect_is_reported_and_does_not_end_it(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged() -> list[str]:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    with monkeypatch.context() as patch:
        patch.setattr(tier._slots, "remove_stale", damaged)
        tier._janitor._clean_at_s = 0.0
        tier._janitor.wake()
        tier._janitor.wait()
    tier._janitor._tasks.put(damaged)
    tier._janitor.wait()
    tier.take_reports()
    assert tier.troubles == {Trouble.IO_ERROR: 2}
    assert not tier.writable
    assert "UnicodeDecodeError" in caplog.text
    write(tier, 1, "ends", 4, saved_s=1.0)
    tier.forget("ends")
    tier._janitor.wait()
    assert stored(tmp_path) == 0, "it works on"
