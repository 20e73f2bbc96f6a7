"""The benchmark with AIPerf: without it, with one that fails, and how its rounds become a row."""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import aiperf
from benchmarks.peer_packages import SKIPPED
from replicas.tiny.model import tiny_model_directory


def test_without_aiperf_it_skips_and_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aiperf, "INSTALLED", aiperf.ROOT / ".cache" / "absent" / "bin" / "aiperf")
    monkeypatch.setattr(sys, "argv", ["aiperf"])
    assert aiperf.main() == SKIPPED
    assert (
        capsys.readouterr().out
        == f"skipped: AIPerf is not installed in .cache/absent; install it with: {aiperf.INSTALL}\n"
    )
    target = aiperf.INSTALL.removeprefix("make ")
    assert f"\n{target}: requirements/aiperf.txt" in (aiperf.ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("does", "message"),
    [("echo reason; exit 3", "profile: exit status 3\nreason\n"), ("sleep 60", "profile: not done within 0.2 s")],
)
def test_an_aiperf_that_fails_is_an_error_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, message: str
) -> None:
    script = tmp_path / "aiperf"
    script.write_text(f"#!/bin/sh\n{'exec ' if does.startswith('sleep') else ''}{does}\n")
    script.chmod(0o755)
    monkeypatch.setattr(aiperf, "INSTALLED", script)
    with pytest.raises(aiperf.AiperfFailed) as error:
        aiperf.aiperf(["profile"], {}, 0.2 if "sleep" in does else 60.0)
    assert str(error.value).startswith(message)


def test_a_run_that_fails_says_why_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def compare(*_: object) -> None:
        raise aiperf.ReportError("profile_export.jsonl:1: error: missing")

    monkeypatch.setattr(aiperf, "INSTALLED", tmp_path)
    monkeypatch.setattr(aiperf, "own_server", lambda model: nullcontext(argparse.Namespace(url="http://a")))
    monkeypatch.setattr(aiperf, "served", lambda *which: nullcontext("http://b"))
    monkeypatch.setattr(aiperf, "compare", compare)
    monkeypatch.setattr(sys, "argv", ["aiperf"])
    assert aiperf.main() == 1
    assert capsys.readouterr().err == "failed: profile_export.jsonl:1: error: missing\n"
    monkeypatch.setattr(sys, "argv", ["aiperf", "--rounds", "0"])
    with pytest.raises(SystemExit):
        aiperf.main()
    assert "--rounds, --sessions, --concurrency: 1 at least" in capsys.readouterr().err


def test_the_tokenizer_is_found_by_name() -> None:
    with aiperf.tokenizer_cache(tiny_model_directory()) as environment:
        repository = Path(environment["HF_HOME"]) / "hub" / "models--caesura--tiny"
        revision = (repository / "refs" / "main").read_text()
        assert {path.name for path in (repository / "snapshots" / revision).iterdir()} == set(aiperf.TOKENIZER_FILES)
    assert not repository.exists()


def test_a_row_has_sums_of_counts_and_medians_beside_vllms() -> None:
    def result(ttft: float, done: int, session: float | None) -> dict[str, object]:
        same = dict.fromkeys(("requests_per_s", "tokens_per_s", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"), 2.0)
        counts = {"requests": 5, "sessions": 3, "sessions_completed": done, "failed_requests": 3 - done}
        return {"aiperf": "0.13.0", "complete": True, "ttft_p50_ms": ttft, "session_p50_s": session, **same, **counts}

    ours = [result(10.0, 3, 4.0), result(30.0, 2, None), result(20.0, 3, 6.0)]
    own = [result(5.0, 3, 2.0)] * 3
    row = aiperf.row_of(aiperf.CAESURA, ours, own, argparse.Namespace(concurrency=4, seed=7))
    assert (row["sessions"], row["sessions_completed"], row["failed_requests"], row["rounds"]) == (9, 8, 1, 3)
    assert (row["ttft_p50_ms"], row["ttft_p50_ms_x_vllm"]) == (20.0, 4.0)
    assert (row["session_p50_s"], row["session_p50_s_x_vllm"]) == (5.0, 2.5)
    assert "sessions_known" not in row
