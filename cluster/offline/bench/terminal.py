"""What commands print: tables that are never cut, and the progress of a run."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Self, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.core.clock import MonotonicClock
from cluster.core.slo import Outcome, ProgramRecord
from cluster.offline.bench.metrics import QUANTITIES, Quantity, Result, shown, value_of

WIDEST = 10_000
"""Columns of a terminal that no table needs."""
BEAT_S = 10.0
"""Without a terminal, a line of progress is printed at least this often."""


def print_table(table: Table, console: Console) -> None:
    """Print a table whole: a line that is longer than the terminal goes on in the next one, nothing is cut off."""
    needed = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    width, console.width = console.width, max(console.width, needed)
    console.print(table)
    console.width = width


def print_comparison(
    title: str, columns: Mapping[str, Sequence[Result]], console: Console, *, verbose: bool, leave_out: str = ""
) -> None:
    """Print what policies are compared by, a column a policy, in as many blocks as the terminal's width asks for.

    Args:
        title: above the first block.
        columns: the results of each policy, one for each seed; the first policy is what others are compared with.
        console: where to.
        verbose: everything that is known, with the ratio to the first policy; else the dozen that decide.
        leave_out: a group of `QUANTITIES` that means nothing here.
    """
    rows = [
        quantity
        for group, quantities in QUANTITIES.items()
        for quantity in (quantities if group != leave_out else ())
        if (verbose or quantity.deciding) and any(value_of(quantity, each) is not None for each in columns.values())
    ]
    first = next(iter(columns.values()))
    cells = {
        name: [_cell(quantity, results, first if verbose and results is not first else None) for quantity in rows]
        for name, results in columns.items()
    }
    labels = [quantity.label for quantity in rows]
    console.print(f"\n{title}", markup=False, highlight=False, soft_wrap=True)
    for block in _blocks(cells, max(map(len, labels), default=0), console.width):
        table = Table("", *block, box=box.SIMPLE_HEAD, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for label, *values in zip(labels, *(cells[name] for name in block), strict=True):
            table.add_row(label, *values)
        print_table(table, console)


def _cell(quantity: Quantity, results: Sequence[Result], first: Sequence[Result] | None) -> str:
    value = value_of(quantity, results)
    base = None if first is None else value_of(quantity, first)
    return f"{shown(value)} (x{value / base:.2f})" if value is not None and base else shown(value)


def _blocks(cells: Mapping[str, Sequence[str]], label_width: int, width: int) -> Iterator[list[str]]:
    """The columns that fit beside the labels, block by block; one that is too wide has a block of its own."""
    block: list[str] = []
    used = label_width + 2
    for name, values in cells.items():
        needed = 3 + max(len(text) for text in (*name.split("\n"), *values))
        if block and used + needed > width:
            yield block
            block, used = [], label_width + 2
        block.append(name)
        used += needed
    yield block


@contextmanager
def heartbeat(line: Callable[[], str], stream: TextIO, every_s: float = BEAT_S) -> Iterator[None]:
    """Write what ``line`` returns now and then, from a thread: what runs here may not come back for minutes."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(every_s):
            _write(stream, line())

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class RunProgress:
    """How far a run is, on stderr: a bar on a terminal, elsewhere a line at least every ten seconds.

    Use it as a context manager. It is a `cluster.offline.bench.runner.BenchProgress`.
    """

    def __init__(
        self, blocks: int = 1, *, quiet: bool = False, stream: TextIO | None = None, every_s: float = BEAT_S
    ) -> None:
        self._stream = stream or sys.stderr
        console = Console(file=self._stream, quiet=quiet)
        named = TextColumn("{task.description}")
        columns = (named, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[detail]}"))
        # What is printed to stdout meanwhile stays there: rich would bring it to the bar's console.
        self._bar = Progress(
            *columns,
            console=console,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._shown: AbstractContextManager[object] = nullcontext()
        if not quiet:
            self._shown = self._bar if console.is_terminal else heartbeat(self._line, self._stream, every_s)
        self._in_lines = not quiet and not console.is_terminal
        self._blocks = blocks
        self._clock = MonotonicClock()
        self._began_s = self._clock.now_s()
        self._outcomes: Counter[Outcome] = Counter()
        self._state = ("starting", 0, 0, "")
        self._task = self._bar.add_task("starting", total=None, detail="")

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(None, None, None)

    def begin(self, name: str, total: int) -> None:
        """A part of ``total`` steps begins."""
        if not self._state[2]:
            self._bar.remove_task(self._task)
        self._state = (name, 0, total, "")
        self._task = self._bar.add_task(name, total=total, detail="")
        self._announce()

    def advance(self, detail: str) -> None:
        """One more step is done."""
        name, done, total, _ = self._state
        self._state = (name, done + 1, total, detail)
        self._bar.update(self._task, advance=1, detail=detail)
        if done + 1 == total:
            self._announce()

    def block(self, policy: str, block: int, programs: int) -> None:
        """See BenchProgress."""
        self._outcomes.clear()
        self.begin(f"block {block + 1}/{self._blocks} {policy}", programs)

    def ended(self, program: ProgramRecord) -> None:
        """See BenchProgress."""
        self._outcomes[program.outcome] += 1
        self.advance(", ".join(f"{count} {outcome.value}" for outcome, count in self._outcomes.items()))

    def _announce(self) -> None:
        if self._in_lines:
            _write(self._stream, self._line())

    def _line(self) -> str:
        name, done, total, detail = self._state
        elapsed_s = self._clock.now_s() - self._began_s
        count = f": {done} of {total}" if total else ""
        return f"{elapsed_s:6.0f} s  {name}{count}" + (f" ({detail})" if detail else "")


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()
