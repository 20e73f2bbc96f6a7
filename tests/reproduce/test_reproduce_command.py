"""`caesura reproduce` on a small plan: the table, the JSON, the plots, and its complaints."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.core.errors import ConfigError
from cluster.offline.reproduce import plan, running
from cluster.offline.reproduce.plan import Paper

TURN = {"new_prompt_tokens": 40, "context_tokens": 40, "output_tokens": 8, "tool": "ls", "tool_duration_s": 0.5}
LAST = {"new_prompt_tokens": 0, "context_tokens": 60, "output_tokens": 4, "tool": None, "tool_duration_s": None}
PROGRAM = {
    "program_id": "small/1",
    "source": "small",
    "category": "math",
    "turns": [TURN | {"tool_return_tokens": 12}, LAST | {"tool_return_tokens": None}],
}
SMALL: dict[str, Any] = {
    "title": "a paper",
    "figures": {
        "table1": {
            "title": "Table 1",
            "settings": {
                "trace": "small",
                "preset": "gpt-j-6b/a100-40@2023",
                "prefix_cache": False,
                "minutes": 0.5,
                "warmup_minutes": 0,
                "drain_s": 60,
                "calls": [1, 1],
            },
            "systems": {"vLLM": {"policy": "vllm-nocache"}, "LAMPS": {"policy": "lamps"}},
            "loads": {"1": {"rate": 1, "quick": True}, "2": {"rate": 2, "quick": True}},
            "measures": {"latency": "latency_s.mean", "throughput": "throughput"},
            "rows": [
                {"what": "latency of LAMPS", "system": "LAMPS", "load": "2", "measure": "latency", "published": 1.0},
                {
                    "what": "vLLM over LAMPS",
                    "kind": "ratio",
                    "system": "vLLM",
                    "against": "LAMPS",
                    "measure": "latency",
                    "published": 1.0,
                },
            ],
            "factors": {"slow": {"what": "slower", "settings": {"slower": 3.0}}},
            "missing": ["something: its data are not public."],
        }
    },
}

SMALL["figures"]["table2"] = SMALL["figures"]["table1"] | {"loads": {"1": {"rate": 1}, "2": {"rate": 2}}}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    other = PROGRAM | {"program_id": "small/2", "turns": PROGRAM["turns"][-1:]}
    with gzip.open(tmp_path / "small.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(one) + "\n" for one in (PROGRAM, other)))
    return tmp_path


def caesura(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(plan, "paper_of", lambda name: Paper.model_validate(SMALL))
    monkeypatch.setattr(sys, "argv", ["caesura", "reproduce", "lamps", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_it_prints_published_numbers_beside_ours_and_writes_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], traces: Path, tmp_path: Path
) -> None:
    out, plots = tmp_path / "out.json", tmp_path / "plots"
    what = ("--traces", str(traces), "--quick", "--factors", "all", "--jobs", "1", "--quiet")
    assert caesura(monkeypatch, *what, "--json", str(out), "--plots", str(plots)) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("published", "latency of LAMPS", "slower", "its data are not public"))
    made: dict[str, Any] = json.loads(out.read_text())
    latency, ratio = made["rows"]
    assert 0.5 < latency["here"] < latency["with_factors"]["slow"]
    assert ratio["here"] >= 1.0
    assert made["seeds"] == [0]
    assert [rate for rate, _ in made["curves"]["table1"]["latency"]["LAMPS"]] == [1, 2]
    assert {path.name for path in plots.iterdir()} == {"table1_latency.svg", "table1_throughput.svg"}


def test_an_interrupted_evaluation_goes_on_and_the_code_is_part_of_a_run(
    monkeypatch: pytest.MonkeyPatch, traces: Path, tmp_path: Path
) -> None:
    runs, outs = tmp_path / "runs", [tmp_path / f"{number}.json" for number in range(3)]
    what = ("--traces", str(traces), "--quick", "--jobs", "1", "--quiet", "--resume", str(runs), "--json")
    assert caesura(monkeypatch, *what, str(outs[0])) == 0
    assert len(list(runs.glob("*.json"))) == 4

    def interrupted(*_: object) -> None:
        raise ConfigError("no run was kept")

    monkeypatch.setattr(running, "simulate", interrupted)
    assert caesura(monkeypatch, *what, str(outs[1])) == 0
    rows = [json.loads(out.read_text())["rows"] for out in outs[:2]]
    assert rows[0] == rows[1]
    monkeypatch.setattr(running, "code_state", lambda: "another")
    assert caesura(monkeypatch, *what, str(outs[2])) == 2
    assert not outs[2].read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--figure", "table9"), "--figure: 'table9' is none of table1"),
        (("--seed", "one"), "--seed"),
        (("--factors", "slow,fast"), "--factors: fast is none of slow, or all"),
        (("--figure", "table2", "--quick"), "--quick: it runs no load of table2"),
    ],
)
def test_bad_arguments_are_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    traces: Path,
    arguments: tuple[str, ...],
    complaint: str,
) -> None:
    assert caesura(monkeypatch, "--traces", str(traces), "--quiet", *arguments) == 2
    assert complaint in capsys.readouterr().err


def test_a_folder_without_the_trace_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert caesura(monkeypatch, "--traces", str(tmp_path), "--quick", "--jobs", "1", "--quiet") == 2
    assert "--traces: " in capsys.readouterr().err
