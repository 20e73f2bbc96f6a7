"""What commands print: all of it at 80 columns, and progress where there is no terminal."""

import threading
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from cluster.offline.bench.metrics import QUANTITIES, ROUTING
from cluster.offline.bench.terminal import RunProgress, heartbeat, print_comparison, print_table

POLICIES = ("vllm-nocache", "vllm", "infercept", "mars", "augserve", "continuum", "caesura\nprefix_affinity")


def spread(mean: float) -> dict[str, float]:
    return {"mean": mean, "p50": 0.8 * mean, "p95": 2.0 * mean, "p99": 3.0 * mean}


def result(scale: float) -> dict[str, Any]:
    spreads = ("ttft_s", "ttft_all_s", "tpot_s", "client_lag_s", "jct_s", "completion_all_s", "schedule_ms")
    return {
        "goodput_programs": 0.883 * scale,
        "goodput_programs_first": 0.9 * scale,
        "goodput_requests": 3.1 * scale,
        "attainment": 0.5,
        "attainment_ttft": 0.912,
        "offered": 12_345,
        "completed": 12_300,
        "outcomes": {"failed": 1, "rejected": 2, "timed_out": 3, "unfinished": 39},
        "tokens_per_s": 12_345.6,
        "cached_share": 0.875,
        "recomputed_tokens": 20_128.0 * scale,
        "wasted_gib_s": 1_429.1,
        **{key: spread(scale) for key in spreads},
        "kinds": {"math": {"offered": 7, "attainment": 0.5}},
        "simulation": {"routing": {"moves": 3, "split": 0}},
    }


def shown(width: int, *, verbose: bool = False, leave_out: str = "") -> list[str]:
    console = Console(width=width, file=StringIO(), record=True)
    columns = {name: [result(1.0 + number)] for number, name in enumerate(POLICIES)}
    print_comparison("1 programs/s", columns, console, verbose=verbose, leave_out=leave_out)
    return console.export_text().splitlines()


def blocks(lines: list[str]) -> list[list[str]]:
    """The rows below each rule, by their label."""
    found: list[list[str]] = []
    for line in lines:
        if "──" in line:
            found.append([])
        elif found and line.strip() and line.startswith(" ") and line[1] != " ":
            found[-1].append(line.strip().split("  ")[0])
    return found


@pytest.mark.parametrize("verbose", [False, True])
def test_all_policies_are_shown_at_80_columns_in_several_blocks(verbose: bool) -> None:
    lines = shown(80, verbose=verbose)
    text = "\n".join(lines)
    assert "…" not in text
    assert max(map(len, lines)) <= 80
    for name in POLICIES:
        for part in name.split("\n"):
            assert part in text
    first, *others = blocks(lines)
    assert len(others) >= 1
    assert all(other == first for other in others)
    assert len(set(first)) == len(first)
    for percentile in ("p50", "p95", "p99") if verbose else ("p50", "p99"):
        assert f"TTFT {percentile}, s" in first


def test_about_a_dozen_rows_decide_and_verbose_has_all() -> None:
    every = [quantity.label for group in QUANTITIES.values() for quantity in group]
    assert len(set(every)) == len(every)
    deciding = blocks(shown(200))[0]
    assert 10 <= len(deciding) <= 14
    assert set(deciding) < set(blocks(shown(200, verbose=True))[0])
    routing = {quantity.label for quantity in QUANTITIES[ROUTING]}
    assert routing & set(blocks(shown(200, verbose=True))[0])
    assert not routing & set(blocks(shown(200, verbose=True, leave_out=ROUTING))[0])
    assert {"math: programs", "math: in SLO, %"} <= set(blocks(shown(200, verbose=True))[0]) - set(deciding)


def test_a_cell_is_the_mean_over_seeds_and_what_nobody_knows_is_left_out() -> None:
    console = Console(width=80, file=StringIO(), record=True)
    columns = {"one": [{"completed": 10, "wasted_gib_s": None}, {"completed": 30}], "other": [{"completed": None}]}
    print_comparison("", columns, console, verbose=False)
    [rows] = [line.split() for line in console.export_text().splitlines() if "completed" in line]
    assert rows == ["programs", "completed", "20", "-"]
    assert "KV wasted" not in console.export_text()


def test_a_table_is_not_cut_however_narrow_the_terminal() -> None:
    console = Console(width=40, file=StringIO(), record=True)
    table = Table("program", "tool")
    table.add_row("x" * 70, "mcp__" + "y" * 70)
    print_table(table, console)
    text = console.export_text()
    assert "x" * 70 in text and "mcp__" + "y" * 70 in text
    assert console.width == 40


class Lines(StringIO):
    """A pipe in which two lines have been awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.two = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") >= 2:
            self.two.set()
        return written


def test_without_a_terminal_a_line_comes_now_and_then_even_if_nothing_ends() -> None:
    pipe = Lines()
    with heartbeat(lambda: "still here", pipe, every_s=0.001):
        assert pipe.two.wait(30.0)
    assert set(pipe.getvalue().splitlines()) == {"still here"}


def test_progress_without_a_terminal_has_lines_and_no_control_characters() -> None:
    pipe = Lines()
    with RunProgress(stream=pipe, every_s=0.001) as progress:
        progress.begin("runs", 2)
        progress.advance("vllm at 1/s")
        progress.advance("caesura at 1/s")
        assert pipe.two.wait(30.0)
    text = pipe.getvalue()
    assert "runs: 0 of 2" in text and "runs: 2 of 2 (caesura at 1/s)" in text
    assert "\x1b" not in text and "\r" not in text


def test_a_quiet_run_has_no_progress() -> None:
    pipe = Lines()
    with RunProgress(quiet=True, stream=pipe, every_s=0.001) as progress:
        progress.begin("runs", 1)
        progress.advance("")
    assert pipe.getvalue() == ""
