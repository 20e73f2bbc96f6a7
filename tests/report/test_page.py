"""The page: whole, self-contained, and with what was recorded in it."""

import re
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.offline.bench.record import RunLine, write
from cluster.offline.report.drawing import Axis, linear, logarithmic
from cluster.offline.report.page import render
from cluster.offline.report.plots import steps
from cluster.offline.report.reading import read
from tests.report.recorded_runs import PROGRAMS, lines

VOID = {"meta", "line", "polyline", "polygon", "rect", "circle"}


class Tags(HTMLParser):
    """Are all that are opened closed, in order? What is named, and what would be loaded?"""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def caesura(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["caesura", "report", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_one_page_that_loads_nothing(record: Path) -> None:
    page = render(read([record]))
    tags = parsed(page)
    assert tags.loads == []
    assert "script" not in tags.seen
    assert "url(" not in page and "@import" not in page
    # Two of load, three of latencies, memory and programs of each of two policies.
    assert tags.seen.count("svg") == 2 + 3 + 2 + 2


def test_what_was_recorded_is_in_it(record: Path) -> None:
    page = render(read([record]))
    assert "vllm · caesura on live/tiny" in page
    assert "×2.00 of vllm" in page  # noqa: RUF001
    assert "released for 2 s: expired" in page
    assert "turn 2: 140 + 20 tokens" in page
    assert "in the mean: running 50%, held 20%, cached 10%, empty 20%" in page
    assert "caesura bench --policies vllm,caesura --record run.jsonl" in page
    assert page.count('class="name"') > 0 and f"{PROGRAMS}" in page
    assert not re.search(r"\b(nan|inf|None)\b", page)


def test_a_single_load_is_shown_as_bars(tmp_path: Path) -> None:
    one = [line for line in lines() if line.run < 2]
    path = tmp_path / "one.jsonl"
    write(one, path)
    page = render(read([path]))
    parsed(page)
    assert "at 1 offered programs per second" in page


def test_a_run_in_which_nothing_happened_is_a_page_too(tmp_path: Path) -> None:
    heads = [line for line in lines() if isinstance(line, RunLine)]
    path = tmp_path / "empty.jsonl"
    write(heads, path)
    parsed(render(read([path])))


def test_words_from_a_file_are_words(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"policy": "<b>x</b>", "rate": 1, "goodput_programs": 1, "attainment": null, "command": "<i>"}\n')
    page = render(read([path]))
    parsed(page)
    assert "<b>x</b>" not in page and "<i>" not in page.split("</style>")[1].replace("<i></i>", "")


def test_the_command_writes_beside_the_record(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert caesura(monkeypatch, str(record)) == 0
    assert capsys.readouterr().out == f"Wrote {record.with_suffix('.html')}\n"
    assert record.with_suffix(".html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("arguments", [("nowhere.jsonl",), ("{record}", "--out", "/nowhere/at/all.html")])
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert caesura(monkeypatch, *(text.format(record=record) for text in arguments)) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_axes_have_round_ticks() -> None:
    axis = linear([0.3, 3.7], "")
    assert (axis.low, axis.high) == (0.0, 4.0)
    assert set(axis.ticks) >= {0.0, 1.0, 2.0, 3.0, 4.0}
    assert (axis.at(-1), axis.at(2), axis.at(9)) == (0.0, 0.5, 1.0)
    log = logarithmic([0.01, 100.0], "")
    assert log.at(1.0) == pytest.approx(0.5)
    assert [log.named(tick) for tick in log.ticks] == ["0.01", "0.1", "1", "10", "100"]
    assert linear([], "").high > 0 and logarithmic([], "").high > 0
    assert Axis(0, 1, (), "").named(20_000.0) == "20k"


def test_a_distribution_keeps_its_ends() -> None:
    values = [float(n) for n in range(1, 5001)]
    points = steps(values, len(values))
    assert points[0] == (1.0, 0.0) and points[-1] == (5000.0, 1.0)
    assert len(points) < 700
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(points))
    assert steps(values[:2500], 5000)[-1] == (2500.0, 0.5)
    assert steps([], 0) == []
