"""Terminal output of commands: tables that are never cut off, and the progress of a run."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from types import TracebackType
from typing import Self, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.core.clock import MonotonicClock
from cluster.core.slo import Outcome, ProgramRecord
from cluster.offline.bench.metrics import QUANTITIES, Quantity, Result, of_kinds, shown, value_of

WIDEST = 10_000
"""Width in columns that no table exceeds."""
BEAT_S = 10.0
"""Seconds between two lines of progress at most, where stderr is no terminal."""


def print_table(table: Table, console: Console) -> None:
    """Print a table without cutting it off. A line that is wider than the terminal wraps."""
    needed = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    width, console.width = console.width, max(console.width, needed)
    console.print(table)
    console.width = width


def print_comparison(
    title: str, columns: Mapping[str, Sequence[Result]], console: Console, *, verbose: bool, leave_out: str = ""
) -> None:
    """Print a comparison with a column for each policy. It has several blocks if the terminal is too narrow.

    Args:
        title: the title above the first block.
        columns: the results of each policy, one for each seed. The first policy is the baseline.
        console: the console to print to.
        verbose: prints all known quantities, with their ratio to the baseline, and those of each kind of program;
            otherwise only the deciding ones.
        leave_out: a group of `QUANTITIES` that does not apply here.
    """
    shown_groups = {group: quantities for group, quantities in QUANTITIES.items() if group != leave_out}
    if verbose:
        shown_groups["Kinds of programs"] = of_kinds(chain.from_iterable(columns.values()))
    rows = [
        quantity
        for quantity in chain.from_iterable(shown_groups.values())
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
    """Yield the names of the columns of each block, which fit beside the labels. A wider column gets its own block."""
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
    """Write the result of ``line`` periodically from a thread, because the body may block for minutes."""
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
    """Shows the progress of a run on stderr: a bar on a terminal, otherwise a line at least every ten seconds.

    It is a context manager and a `cluster.offline.bench.runner.BenchProgress`.
    """

    def __init__(
        self, blocks: int = 1, *, quiet: bool = False, stream: TextIO | None = None, every_s: float = BEAT_S
    ) -> None:
        self._stream = stream or sys.stderr
        console = Console(file=self._stream, quiet=quiet)
        named = TextColumn("{task.description}")
        columns = (named, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[detail]}"))
        # Without this, rich would redirect all output to stdout to the console of the bar.
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
        """Begin a part with ``total`` steps."""
        if not self._state[2]:
            self._bar.remove_task(self._task)
        self._state = (name, 0, total, "")
        self._task = self._bar.add_task(name, total=total, detail="")
        self._announce()

    def advance(self, detail: str) -> None:
        """Count one more step as done."""
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
