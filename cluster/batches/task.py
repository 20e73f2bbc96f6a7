"""One batch in the ingress that works on it: its lines, their results, and its files.

Results are written to the log of the batch as they come. A line whose result is in the log is never started again,
whichever ingress works on the batch, and a result that is not in the log is in no file. The output is made of the log
when no line is left, and only then is the batch closed.
"""

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from time import time
from typing import Any, TypeVar

import msgspec

from cluster.batches.content import joined, packed, unpacked
from cluster.batches.input_lines import InputLine, Validation, numbered
from cluster.batches.records import (
    BATCH_LABEL,
    INPUT_LABEL,
    Batch,
    BatchEvent,
    Ended,
    Line,
    LineError,
    Marked,
    Pause,
    Progress,
    Status,
    encode,
    to_text,
)
from cluster.batches.results import UNDONE, LineAnswer, answered, undone
from cluster.batches.window import BatchWindow
from cluster.core.errors import RunLeaseLost, RunStoreUnavailable, RunUnknown
from cluster.runs.journal import Journal, LogForm
from cluster.store.files import FileStore, StoredFile
from cluster.store.runs.records import NewRun
from cluster.store.runs.store import RunStore

logger = logging.getLogger("ray.serve")

RETRY_S = 1.0
"""Seconds between two attempts to reach the store."""
PROGRAM = "batch"
"""The program of the logs of batches."""
OUTPUT_PURPOSE = "batch_output"
_INPUT_GONE = LineError("input_file_not_found", "the input file does not exist any more", param="input_file_id")

Result = TypeVar("Result")


def new_run(batch: Batch, progress: Progress) -> NewRun:
    """Return the log of a batch as the store knows it."""
    labels = {BATCH_LABEL: to_text(batch), INPUT_LABEL: batch.input_file_id}
    return NewRun(batch.id, batch.tenant, PROGRAM, labels, status=to_text(progress))


class BatchTask:
    """The work on one batch.

    Args:
        batch: the batch.
        progress: how far it is.
        events: its log.
        store: has the log, whose lease this process has.
        files: has the input, and gets the output.
        kept_s: seconds for which output is kept if the batch does not say it.
        most_lines: largest number of lines in flight.
        on_change: called when lines may have become ready to be started.
        wall: returns the Unix time in seconds.
    """

    def __init__(
        self,
        batch: Batch,
        progress: Progress,
        events: list[BatchEvent],
        store: RunStore,
        files: FileStore,
        kept_s: float,
        most_lines: int,
        on_change: Callable[[], object],
        wall: Callable[[], float] = time,
    ) -> None:
        self.batch = batch
        self.progress = progress
        self.window = BatchWindow(most_lines)
        """How many lines may be in flight now."""
        self.in_flight: dict[int, asyncio.Task[None]] = {}
        """The lines that are being answered, by number."""
        self.result_bytes = 0
        """Size of all results."""
        self.is_loading = False
        self.loaded_s = -math.inf
        """Time at which the lines were last read, in seconds on the clock of whoever loads them; -inf: never."""
        self._files = files
        self._kept_s = kept_s
        self._on_change = on_change
        self._most_lines = most_lines
        self._is_taken_over = progress.attempts > 0
        self._wall = wall
        form: LogForm[BatchEvent] = LogForm(
            encode, lambda event: isinstance(event, Ended), lambda _: to_text(self.progress), compact=True
        )
        self.journal: Journal[BatchEvent] = Journal(store, new_run(batch, progress), events, form)
        self._results: dict[int, Line] = {}
        for event in events:
            if isinstance(event, Line):
                self._add(event)
        # A process that died between two writes has stored results, and not yet their numbers.
        completed = sum(result.ok for result in self._results.values())
        failed = len(self._results) - completed
        self.progress = msgspec.structs.replace(progress, completed=completed, failed=failed)
        self._pieces: list[bytes] | None = None
        self._input: StoredFile | None = None
        self._input_lost = False
        """Whether the store may have lost the input."""
        self._lines: Iterator[InputLine] = iter(())
        self._again: deque[InputLine] = deque()
        self._attempts: Counter[int] = Counter()
        self._stopped = asyncio.Event()
        """Set when no line is left, or none is started any more, and none is in flight."""

    # --- the batch ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until the batch has ended. Somebody else starts the lines meanwhile.

        Raises:
            RunLeaseLost: another ingress works on the batch now.
        """
        self._mark(attempts=self.progress.attempts + 1)
        if self.progress.status == "validating":
            errors = await self._validated()
            if errors and self.progress.status == "validating":
                self._mark(status="failed", ended_s=self._wall(), errors=errors)
                self.journal.record(Ended("failed"))
                await self.journal.flush()
                return
            if self.progress.status == "validating":
                self._mark(status="in_progress", began_s=self._wall())
        self._stop_if_done()
        await self._stopped.wait()
        await self._finalize()

    def close(self, status: Status) -> None:
        """Start no more lines, stop those in flight, and end the batch with ``status``. A second call does nothing."""
        if self.progress.closing is not None or self.progress.ended_s is not None:
            return
        if status == "cancelled":
            self._mark(closing=status, status="cancelling", cancelling_s=self._wall())
        else:
            self._mark(closing=status)
        for line in self.in_flight.values():
            line.cancel()
        self._stop_if_done()

    def abandon(self) -> None:
        """Stop, because another ingress has the batch, or will have it. Nothing more is written."""
        self.journal.abandon()
        for line in self.in_flight.values():
            line.cancel()

    def pause(self, reason: Pause | None) -> None:
        """Start no lines for this reason; None: go on."""
        if reason != self.progress.paused and self.progress.ended_s is None:
            self._mark(paused=reason)
            if reason is not None:
                logger.warning("batch %s is paused: %s", self.batch.id, reason)

    def restore(self) -> None:
        """Write the log again, because the store has lost it. `restore_input` does the same for the input."""
        self.journal.write_again()
        self._input_lost = True

    async def restore_input(self) -> None:
        """Write the input again if the store has lost it and it is in memory. Called until it is there.

        Raises:
            RunStoreUnavailable: the store does not answer.
        """
        file, pieces = self._input, self._pieces
        if not self._input_lost:
            return
        if file is None or pieces is None or await self._files.find(file.tenant, file.id) is not None:
            self._input_lost = False
            return
        with contextlib.suppress(RunLeaseLost):  # another batch with this input writes it, or it was deleted
            await self._files.write(file, pieces)

    # --- lines --------------------------------------------------------------------------------------------------------

    @property
    def left(self) -> int:
        """Number of lines without a result."""
        return max(0, self.progress.total - len(self._results))

    def left_by_others(self) -> list[int]:
        """Return the numbers of lines that an earlier ingress may have left in flight, and that are not in flight here.

        Lines are started in their order, and those that were put back come first. So these are the first lines without
        a result. Twice the largest number in flight leaves room for empty lines, which have numbers, too.
        """
        if not self._is_taken_over:
            return []
        numbers = (number for number in count(1) if number not in self._results and number not in self.in_flight)
        return list(islice(numbers, min(self.left, 2 * self._most_lines)))

    def may_start(self, now_s: float) -> bool:
        """Return whether a line may be started now."""
        ready = self.progress.status == "in_progress" and self.progress.closing is None
        ready = ready and self.progress.paused is None and self.left > len(self.in_flight)
        return ready and self.window.may_start(len(self.in_flight), now_s)

    @property
    def goes_on(self) -> bool:
        """Whether lines are started here until each has a result."""
        return self.progress.closing is None and self.progress.ended_s is None and not self.journal.lost

    @property
    def is_loaded(self) -> bool:
        """Whether the lines are in memory."""
        return self._pieces is not None

    @property
    def can_unload(self) -> bool:
        """Whether the lines are in memory only for more of them to be started."""
        return self.is_loaded and not self.is_loading and self.goes_on and self.progress.status == "in_progress"

    def is_idle(self, now_s: float) -> bool:
        """Whether the lines are in memory although none is in flight and none may be started now."""
        return self.can_unload and not self.in_flight and not self.may_start(now_s)

    def unload(self) -> None:
        """Forget the lines until `load`. Those in flight go on, and `load` finds them again if they are put back."""
        self._pieces, self._lines = None, iter(())
        self._again.clear()

    async def load(self) -> None:
        """Read the lines. They fail if the input is gone."""
        pieces = await self._read()
        if pieces is None:
            if self.progress.closing is None:
                self._mark(errors=(_INPUT_GONE,))
                self.close("failed")
            return
        lines = numbered(map(unpacked, pieces))
        # An ingress that takes a batch over skips many lines.
        first = await asyncio.to_thread(lambda: [*islice((one for one in lines if one.number not in self._results), 1)])
        self._lines = chain(first, lines)

    def take(self) -> InputLine | None:
        """Return a line to be started now; None: there is none."""
        for _ in range(len(self._again)):
            line = self._again.popleft()
            if self._is_left(line):
                return line
            if line.number not in self._results:
                self._again.append(line)
        for line in self._lines:
            if self._is_left(line):
                return line
        return None

    def _is_left(self, line: InputLine) -> bool:
        return line.number not in self._results and line.number not in self.in_flight

    def attempt(self, line: InputLine) -> int:
        """Count an attempt at a line, and return the number of its attempts that count."""
        self._attempts[line.number] += 1
        return self._attempts[line.number]

    def put_back(self, line: InputLine, *, counts: bool) -> None:
        """Start a line again later. ``counts``: whether the attempt counts."""
        if not counts:
            self._attempts[line.number] -= 1
        if self.is_loaded:
            self._again.append(line)

    def answered(self, line: InputLine, custom_id: str, answer: LineAnswer) -> None:
        """Record the result of a line."""
        if line.number in self._results or self.progress.closing is not None:
            return
        text = answered(self.batch, line.number, custom_id, answer)
        result = Line(line.number, answer.is_ok, packed(text), len(text))
        self._attempts.pop(line.number, None)
        self._add(result)
        ok, failed = self.progress.completed + result.ok, self.progress.failed + (not result.ok)
        self.progress = msgspec.structs.replace(self.progress, completed=ok, failed=failed)
        self.journal.record(result)

    def line_ended(self, number: int) -> None:
        """Record that a line is no longer in flight."""
        del self.in_flight[number]
        self._stop_if_done()

    def _add(self, result: Line) -> None:
        self._results[result.number] = result
        self.result_bytes += result.size

    def _stop_if_done(self) -> None:
        begun = self.progress.status in ("in_progress", "cancelling", "finalizing")
        done = self.progress.closing is not None or self.left == 0
        if begun and done and not self.in_flight:
            self._stopped.set()

    def _mark(self, **changes: Any) -> None:
        self.progress = msgspec.structs.replace(self.progress, **changes)
        self.journal.record(Marked())
        self._on_change()

    # --- files --------------------------------------------------------------------------------------------------------

    async def _read(self) -> list[bytes] | None:
        """Read the input; None: it does not exist any more."""

        async def read() -> list[bytes] | None:
            self._input = await self._files.find(self.batch.tenant, self.batch.input_file_id)
            if self._input is None:
                return None
            try:
                return [piece async for piece in self._files.pieces(self._input.id)]
            except RunUnknown:
                return None

        if self._pieces is None:
            self._pieces = await self._until_stored(read)
        return self._pieces

    async def _validated(self) -> tuple[LineError, ...]:
        pieces = await self._read()
        if pieces is None:
            return (_INPUT_GONE,)
        validation = Validation(self.batch.endpoint)
        await asyncio.to_thread(lambda: _each(numbered(map(unpacked, pieces)), validation.check))
        self._pieces = None  # the batch may wait for long until it is its turn
        errors = validation.result()
        if not errors:
            self._mark(total=validation.lines)
        return errors

    async def _finalize(self) -> None:
        status = self.progress.closing or "completed"
        keeps = self.progress.status == "cancelling"
        self._mark(finalizing_s=self._wall(), **({} if keeps else {"status": "finalizing"}))
        await self.journal.flush()
        undone_lines = [] if status not in UNDONE or not self.left else await self._undone(status)
        results = [self._results[number] for number in sorted(self._results)]
        good = [one.text for one in results if one.ok]
        bad = [one.text for one in results if not one.ok]
        output = await asyncio.to_thread(_content, good)
        errors = await asyncio.to_thread(_content, [*bad, *undone_lines])
        while True:
            try:
                await self._forget_earlier_files()
                output_id = await self._store_file("output", output)
                error_id = await self._store_file("error", errors)
                break
            except RunLeaseLost:
                if self.journal.lost:
                    raise
                # The store has lost a part of a file, or has closed one without an answer: they are written again.
                self._mark(attempts=self.progress.attempts + 1)
                await self.journal.flush()
        self._mark(
            status=status,
            ended_s=self._wall(),
            failed=self.progress.failed + len(undone_lines),
            output_file_id=output_id,
            error_file_id=error_id,
            paused=None,
        )
        self.journal.record(Ended(status))
        await self.journal.flush()

    async def _undone(self, status: Status) -> list[bytes]:
        """Return the lines of the error file, packed, for requests that were not executed."""
        pieces = await self._read()
        if pieces is None:
            return []

        def made() -> list[bytes]:
            return [
                packed(undone(self.batch, line.number, line.request.custom_id, status))
                for line in numbered(map(unpacked, pieces))
                if line.number not in self._results
            ]

        return await asyncio.to_thread(made)

    async def _store_file(self, kind: str, content: tuple[int, list[bytes]]) -> str | None:
        size, pieces = content
        if not pieces:
            return None
        now_s = self._wall()
        expires_s = now_s + (self.batch.output_kept_s or self._kept_s)
        name, file_id = f"{self.batch.id}_{kind}.jsonl", self._file_id(kind, self.progress.attempts)
        file = StoredFile(file_id, self.batch.tenant, name, OUTPUT_PURPOSE, size, now_s, expires_s)
        await self._until_stored(lambda: self._files.write(file, pieces))
        return file.id

    async def _forget_earlier_files(self) -> None:
        """Delete files that another ingress made of this batch before it died."""
        for attempt in range(1, self.progress.attempts):
            for kind in ("output", "error"):
                name = self._file_id(kind, attempt)
                await self._until_stored(lambda name=name: self._files.delete(name))  # type: ignore[misc]

    def _file_id(self, kind: str, attempt: int) -> str:
        return f"file-{self.batch.id.removeprefix('batch_')}-{kind}-{attempt}"

    async def _until_stored(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Call until the store answers.

        Raises:
            RunLeaseLost: another ingress works on the batch now.
        """
        while True:
            if self.journal.lost:
                raise RunLeaseLost(f"batch {self.batch.id} is worked on by another ingress")
            try:
                return await call()
            except RunStoreUnavailable as error:
                logger.warning("batch %s waits for its store: %s", self.batch.id, error)
                await asyncio.sleep(RETRY_S)


def _each(lines: Iterable[InputLine], call: Callable[[InputLine], None]) -> None:
    for line in lines:
        call(line)


def _content(lines: Sequence[bytes]) -> tuple[int, list[bytes]]:
    """Return the size of a file of these packed lines, and its pieces."""
    size, pieces = 0, []
    for piece in joined(map(unpacked, lines)):
        size += len(piece)
        pieces.append(packed(piece))
    return size, pieces
