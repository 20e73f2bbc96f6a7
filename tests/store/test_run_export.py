"""What a cluster has run, written as a trace by the command line."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.core.errors import ConfigError
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.runs.events import encode
from cluster.runs.export import PAGE, exported
from cluster.store.runs.records import NewRun
from cluster.store.runs.store import RunStore
from predictor_service.examples import read_programs
from tests.words.test_run_traces import LOG

Make = Callable[..., RunStore]


async def ran(store: RunStore, run_id: str, tenant: str, final: bool = True) -> None:
    entries = [encode(event) for event in LOG]
    await store.create(NewRun(run_id, tenant, "p"), entries[:1])
    await store.append(run_id, 1, entries[1:], final=final)


async def test_closed_runs_of_the_tenant_are_exported_over_pages(ingress: Make) -> None:
    store = ingress("a")
    for number in range(PAGE + 3):
        await ran(store, f"run{number}", "ours")
    await ran(store, "open", "ours", final=False)
    await ran(store, "foreign", "theirs")
    await store.create(NewRun("damaged", "ours", "p"), [b"\xc1"])
    await store.append("damaged", 1, [], final=True)
    traces = [trace async for trace in exported(store, "ours", "cluster")]
    assert len(traces) == PAGE + 3
    assert {trace.program["source"] for trace in traces} == {"cluster"}


async def test_the_command_writes_what_the_predictor_reads(
    ingress: Make, server: EmbeddedRedis, tmp_path: Path
) -> None:
    await ran(ingress("a"), "run", "default")
    command = ["predictor", "export", "--store", server.url, "--out", str(tmp_path / "out")]
    run = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert run.exit_code == 0, run.output
    [program] = read_programs([tmp_path / "out" / "programs.jsonl"], [tmp_path / "out" / "text.jsonl"])
    assert program.source == "cluster" and len(program.turns) == 3


def test_a_store_that_does_not_answer_is_named_and_costs_no_earlier_export(tmp_path: Path) -> None:
    (tmp_path / "programs.jsonl").write_text("earlier\n")
    command = ["predictor", "export", "--store", f"unix://{tmp_path}/nobody", "--out", str(tmp_path)]
    with pytest.raises(ConfigError, match="--store"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"programs.jsonl": "earlier\n"}
