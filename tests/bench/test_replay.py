"""The client and the runner against a server that speaks the protocol, well and badly."""

import asyncio
import json
import re
import sys
from dataclasses import replace
from io import StringIO
from xml.etree import ElementTree

import pytest

from cluster.core.clock import MonotonicClock
from cluster.core.errors import ConfigError
from cluster.core.slo import Outcome, Slo
from cluster.offline.bench.client import Turn, TurnClient, open_session
from cluster.offline.bench.record import bench_lines
from cluster.offline.bench.results import Distribution, as_json, by_block, by_policy
from cluster.offline.bench.runner import Job, Silent, plan_block, policy_order, replay, run_bench
from cluster.offline.bench.settings import BenchSettings
from cluster.offline.bench.tables import print_report, write_json_lines
from cluster.offline.bench.workload import PlannedProgram, PlannedTurn, Shaping
from cluster.offline.report.plots import write_plots
from cluster.offline.report.reading import Runs, runs_of
from tests.waiting import until

CLOCK = MonotonicClock()

TALK = PlannedProgram(
    "talk", "k", (PlannedTurn(50, 6, 6, "ls", 0.01), PlannedTurn(10, 4, 4, "cat", 0.01), PlannedTurn(0, 3, 3))
)

KEYS = {
    *("policy", "preset", "rate", "seed", "host_gib", "offered", "completed", "goodput_programs", "attainment"),
    *("ttft_s", "jct_s", "jct_wall_s", "norm_latency_s", "bubble_s", "recomputed_tokens", "reused_tokens"),
    *("wasted_gib_s", "schedule_ms", "wall_s_per_minute", "goodput_requests", "tpot_s", "fetched_tokens"),
    *("disk_gib", "restart_every_s", "disaggregation"),
    *("outcomes", "attainment_requests", "attainment_ttft", "tokens_per_s", "cached_share", "client_lag_s"),
    *(
        "goodput_programs_first",
        "attainment_first",
        "ttft_all_s",
        "completion_all_s",
        "completion_offered_s",
        "completion_wall_all_s",
    ),
    *("refused", "longest_wait_s", "jain", "kinds", "wasted_by_cause_gib_s", "command"),
}


def jobs(count=1, program=TALK, arrival_s=0.0):
    return [Job(f"p{i}", program, arrival_s, (0, 0, i)) for i in range(count)]


async def run(double, planned, *, drain_s=20.0, turn_timeout_s=20.0, ended=lambda _: None):
    async with open_session() as session:
        client = TurnClient(session, double.url, "double", CLOCK, turn_timeout_s)
        return await replay(planned, client, CLOCK, drain_s, ended)


class Drain:
    """asyncio for the runner, but the time to drain is over when ``ends`` is true, however fast the machine is."""

    def __init__(self, ends) -> None:
        self.ends = ends

    def __getattr__(self, name):
        return getattr(asyncio, name)

    async def wait(self, tasks, **limit) -> None:
        assert 0 < limit["timeout"] <= 21.0
        await until(self.ends)
        assert not any(task.done() for task in tasks)


async def test_a_program_is_replayed_token_by_token(cluster_double) -> None:
    (record,) = await run(cluster_double, jobs())
    assert record.outcome is Outcome.OK
    assert [(t.prompt_tokens, t.output_tokens, t.cached_tokens) for t in record.turns] == [
        (50, 6, 0),
        (66, 4, 50),
        (70, 3, 54),
    ]
    assert [t.previous_context_tokens for t in record.turns] == [0, 56, 70]
    assert (record.recomputed_tokens, record.reused_tokens) == (6 + 16, 50 + 54)

    first, second, third = cluster_double.bodies
    generated = [(50 + i) % 200 + 40 for i in range(6)]
    assert second["prompt"][:56] == first["prompt"] + generated
    assert third["prompt"][:66] == second["prompt"]
    assert first["ignore_eos"] and first["return_token_ids"] and first["stream_options"] == {"include_usage": True}
    assert first["temperature"] == 0 and "seed" not in first
    assert [body["vllm_xargs"] for body in cluster_double.bodies] == [
        {"job_id": "p0", "this_func_call": "ls"},
        {"job_id": "p0", "this_func_call": "cat", "last_func_call": "ls"},
        {"job_id": "p0", "last_func_call": "cat"},
    ]


async def test_latency_counts_from_the_intended_start(cluster_double) -> None:
    cluster_double.delay_s = 0.2
    (record,) = await run(cluster_double, jobs(arrival_s=0.05))
    ends = [turn.last_token_s for turn in record.turns]
    assert record.turns[0].intended_start_s == record.arrival_s
    assert record.turns[1].intended_start_s == pytest.approx(ends[0] + 0.01)
    assert record.turns[2].intended_start_s == pytest.approx(ends[1] + 0.01)
    assert all(turn.ttft_s >= 0.2 and turn.sent_s >= turn.intended_start_s for turn in record.turns)
    assert record.jct_wall_s == pytest.approx(record.jct_s + 0.02)


async def test_a_late_client_is_in_the_latency(cluster_double) -> None:
    turn = Turn("p", 0, CLOCK.now_s() - 3.0, [40] * 5, 2, 0, None, None)
    async with open_session() as session:
        record = await TurnClient(session, cluster_double.url, "double", CLOCK, 20.0).run(turn)
    assert record.outcome is Outcome.OK
    assert record.ttft_s >= 3.0


async def test_arrivals_do_not_wait_for_a_slow_server(cluster_double, monkeypatch) -> None:
    monkeypatch.setattr("cluster.offline.bench.runner.asyncio", Drain(lambda: len(cluster_double.bodies) == 20))
    cluster_double.misbehaviour.kind = "stall"
    planned = [replace(job, arrival_s=0.01 * i) for i, job in enumerate(jobs(20))]
    records = await run(cluster_double, planned)
    assert [record.outcome for record in records] == [Outcome.UNFINISHED] * 20
    assert all(record.turns[0].sent_s is not None for record in records)
    assert len(cluster_double.bodies) == 20


@pytest.mark.parametrize(
    ("kind", "outcome", "error"),
    [
        ("503", Outcome.REJECTED, "HTTP 503"),
        ("400", Outcome.FAILED, "HTTP 400"),
        ("cut", Outcome.FAILED, "without \\[DONE\\]"),
        ("error_event", Outcome.FAILED, "error event: the replica died"),
        ("garbage", Outcome.FAILED, "JSONDecodeError"),
        ("one_short", Outcome.FAILED, "asked for 4 tokens, got 3"),
        ("other_prompt", Outcome.FAILED, "sent 66 prompt tokens, the server counts 65"),
        ("no_ids", Outcome.FAILED, "return_token_ids"),
    ],
)
async def test_what_goes_wrong_ends_the_program(cluster_double, kind, outcome, error) -> None:
    cluster_double.misbehaviour.kind = kind
    cluster_double.misbehaviour.turn = 1
    told = []
    (record,) = await run(cluster_double, jobs(), ended=told.append)
    assert [turn.outcome for turn in record.turns] == [Outcome.OK, outcome]
    assert re.search(error, record.turns[1].error)
    assert record.outcome is outcome
    assert [replace(each, until_s=record.until_s) for each in told] == [record]


async def test_a_turn_times_out(cluster_double) -> None:
    cluster_double.misbehaviour.kind = "stall"
    (record,) = await run(cluster_double, jobs(), turn_timeout_s=0.3)
    assert record.outcome is Outcome.TIMED_OUT
    assert "0.3 s" in record.turns[0].error


async def test_a_server_that_is_not_there_fails_every_program(cluster_double) -> None:
    cluster_double.url = "http://127.0.0.1:9"
    records = await run(cluster_double, jobs(3))
    assert [record.outcome for record in records] == [Outcome.FAILED] * 3


async def test_a_refused_program_counts_up_to_the_end_of_the_drain(cluster_double) -> None:
    cluster_double.misbehaviour.kind = "503"
    began_s = CLOCK.now_s()
    (record,) = await run(cluster_double, jobs(), drain_s=30.0)
    assert record.spent_s == pytest.approx(30.0, abs=0.01)
    assert CLOCK.now_s() - began_s < 20.0


async def test_a_policy_that_cannot_be_set_back_is_noted_beside_the_results(cluster_double) -> None:
    cluster_double.own_policy = {"name": "unknown"}
    result = await run_bench(settings(cluster_double, policies=("vllm",)), Silent())
    assert [block.policy for block in result.blocks] == ["vllm"] * len(result.blocks) and result.blocks
    assert "the server's policy is not what it was (--policies: PUT " in result.workload.notes[-1]


async def test_a_program_cut_off_in_a_pause_is_unfinished(cluster_double, monkeypatch) -> None:
    answered, client_run = [], TurnClient.run

    async def noted(client, turn):
        answered.append(await client_run(client, turn))
        return answered[-1]

    monkeypatch.setattr(TurnClient, "run", noted)
    monkeypatch.setattr("cluster.offline.bench.runner.asyncio", Drain(lambda: answered))
    long_tool = replace(TALK, turns=(replace(TALK.turns[0], pause_s=60.0), *TALK.turns[1:]))
    told = []
    (record,) = await run(cluster_double, jobs(program=long_tool), ended=told.append)
    assert record.outcome is Outcome.UNFINISHED
    assert [turn.outcome for turn in record.turns] == [Outcome.OK]
    assert [replace(each, until_s=record.until_s) for each in told] == [record]


async def test_usage_without_details_leaves_reuse_unknown(cluster_double) -> None:
    cluster_double.misbehaviour.kind = "no_details"
    (record,) = await run(cluster_double, jobs())
    assert record.outcome is Outcome.OK
    assert record.reused_tokens is record.recomputed_tokens is None


async def test_a_bug_of_ours_is_not_swallowed(cluster_double) -> None:
    def broken(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run(cluster_double, jobs(), ended=broken)


def settings(double, **changes):
    shaping = Shaping(scale_lengths=0.02, scale_tools=0.001, max_turns=3)
    values = {"url": double.url, "shaping": shaping, "policies": ("vllm", "continuum"), "rate_per_s": 40.0}
    values |= {
        "duration_s": None,
        "count": 8,
        "blocks": 2,
        "command": "caesura bench --test",
        "drain_s": 20.0,
        "slo": Slo(1.0),
    }
    return BenchSettings(**values | changes)


def test_each_block_begins_with_the_next_policy() -> None:
    assert [policy_order(("a", "b", "c"), block) for block in range(4)] == [
        ("a", "b", "c"),
        ("b", "c", "a"),
        ("c", "a", "b"),
        ("a", "b", "c"),
    ]


def test_the_plan_of_a_block_depends_on_seed_and_block_only(cluster_double) -> None:
    mine = settings(cluster_double)
    pool = mine.load().programs
    assert plan_block(pool, mine, 0) == plan_block(pool, mine, 0)
    assert plan_block(pool, mine, 0) != plan_block(pool, mine, 1)
    assert plan_block(pool, mine, 0) != plan_block(pool, replace(mine, seed=1), 0)


async def test_policies_alternate_and_replay_the_same_programs(cluster_double) -> None:
    result = await run_bench(settings(cluster_double), Silent())
    assert cluster_double.admin == [
        *("policy vllm", "reset", "policy continuum", "reset"),
        *("policy continuum", "reset", "policy vllm", "reset"),
        "policy as configured",
    ]
    assert [(block.policy, block.block) for block in result.blocks] == [
        *(("vllm", 0), ("continuum", 0)),
        *(("continuum", 1), ("vllm", 1)),
    ]
    assert result.model == "double"
    prompts = {}
    for body, headers in zip(cluster_double.bodies, cluster_double.headers, strict=True):
        _, policy, block, number = headers["x-session-id"].split("-")
        prompts.setdefault((policy, block), {}).setdefault(number, []).append(body["prompt"])
    assert prompts["vllm", "0"] == prompts["continuum", "0"]
    assert prompts["vllm", "1"] == prompts["continuum", "1"]
    assert prompts["vllm", "0"] != prompts["vllm", "1"]


async def test_every_program_is_accounted_for(cluster_double) -> None:
    cluster_double.misbehaviour.kind = "503"
    cluster_double.misbehaviour.turn = 1
    result = await run_bench(settings(cluster_double, warmup_s=0.05), Silent())
    for block in result.blocks:
        assert len(block.warmup) + len(block.measured) == 8
        assert len(block.warmup) == sum(
            job.arrival_s < 0.05 for job in plan_block(result.workload.programs, result.settings, block.block)
        )
    for summary in by_policy(result):
        assert summary.goodput.offered_programs == summary.outcomes.total() == summary.outcomes[Outcome.REJECTED]


async def test_the_story_tells_the_bubble(cluster_double) -> None:
    result = await run_bench(settings(cluster_double, blocks=1), Silent())
    for program in result.blocks[0].measured:
        assert program.bubble_s == pytest.approx(0.25 * (len(program.turns) - 1))
    cluster_double.queue_s = None
    silent = await run_bench(settings(cluster_double, blocks=1), Silent())
    assert by_policy(silent)[0].distributions["bubble_s"] == Distribution(None, None, None, None)


async def test_results_have_the_keys_to_keep(cluster_double, tmp_path) -> None:
    result = await run_bench(settings(cluster_double, slo=Slo(ttft_s=30.0)), Silent())
    write_json_lines(result, tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["policy"] for line in lines] == ["vllm", "continuum"]
    for line in lines:
        assert set(line) == KEYS
        for key in ("ttft_s", "tpot_s", "jct_s", "jct_wall_s", "norm_latency_s"):
            assert set(line[key]) == {"mean", "p50", "p95", "p99"}
        assert (line["offered"], line["completed"], line["attainment"], line["attainment_ttft"]) == (16, 16, 1.0, 1.0)
        assert line["outcomes"] == {"ok": 16, "failed": 0, "rejected": 0, "timed_out": 0, "unfinished": 0}
        assert line["goodput_programs"] == pytest.approx(40.0)
        assert line["host_gib"] is line["wasted_gib_s"] is line["schedule_ms"] is line["wall_s_per_minute"] is None
        assert line["command"] == "caesura bench --test"
    assert [len(by_block(result, policy)) for policy in ("vllm", "continuum")] == [2, 2]


async def test_the_report_and_the_plots(cluster_double, tmp_path) -> None:
    from rich.console import Console

    result = await run_bench(settings(cluster_double), Silent())
    console = Console(record=True, width=80, file=StringIO())
    print_report(result, console)
    text = console.export_text()
    assert "…" not in text
    for words in ("good programs/s", "TTFT p50, s", "TTFT p99, s", "Block by block", "caesura bench --test"):
        assert words in text
    assert "scheduling bubble" not in text
    print_report(result, console, verbose=True)
    text = console.export_text()
    for words in ("programs offered", "scheduling bubble", "(x1.00)"):
        assert words in text
    for path in write_plots(Runs(runs_of(bench_lines(result))), tmp_path / "plots"):
        plot = ElementTree.parse(path).getroot()
        assert plot.tag == "{http://www.w3.org/2000/svg}svg"
        assert {"vllm", "continuum"} <= {text.text for text in plot.iter("{http://www.w3.org/2000/svg}text")}


async def test_plots_of_nothing(cluster_double, tmp_path) -> None:
    cluster_double.misbehaviour.kind = "503"
    result = await run_bench(settings(cluster_double), Silent())
    for path in write_plots(Runs(runs_of(bench_lines(result))), tmp_path):
        ElementTree.parse(path)
    assert as_json(by_policy(result)[0], result)["ttft_s"]["mean"] is None


async def test_without_policies_the_server_is_left_as_it_is(cluster_double) -> None:
    result = await run_bench(settings(cluster_double, policies=()), Silent())
    assert cluster_double.admin == []
    assert [summary.policy for summary in by_policy(result)] == ["as-served"]


async def test_a_server_that_cannot_switch_is_refused(cluster_double) -> None:
    with pytest.raises(ConfigError, match=r"--policies: PUT .*/admin/policy answered 400: .*unknown policy"):
        await run_bench(settings(cluster_double, policies=("unknown",)), Silent())
    with pytest.raises(ConfigError, match="--url"):
        await run_bench(settings(cluster_double, url="http://127.0.0.1:9"), Silent())


async def test_a_cancelled_run_leaves_nothing_behind(cluster_double) -> None:
    cluster_double.misbehaviour.kind = "stall"
    task = asyncio.create_task(run_bench(settings(cluster_double), Silent()))
    await cluster_double.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cluster_double.admin[-1] == "policy as configured"
    assert [t for t in asyncio.all_tasks() if t.get_coro().__name__ == "_run"] == []


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("--url", {"url": "localhost:8000"}),
        ("--url", {"url": "http://[::1"}),
        ("--workload", {"workload": "other"}),
        ("--rate", {"rate_per_s": 0.0}),
        ("--rate", {"rate_per_s": float("nan")}),
        ("--rate", {"rate_per_s": 1e9, "count": None, "duration_s": 10.0}),
        ("--count", {"count": 0}),
        ("--count", {"count": 10**9}),
        ("--count, --duration-s", {"duration_s": 10.0}),
        ("--blocks", {"blocks": 0}),
        ("--arrivals", {"arrivals": "gamma"}),
        ("--policies", {"policies": ("a", "a")}),
        ("--warmup-s", {"warmup_s": 1.0}),
        ("--drain-s", {"drain_s": -1.0}),
        ("--seed", {"seed": -1}),
        ("--slo-ttft", {"slo": Slo(ttft_s=0.0)}),
        ("--slo-norm", {"slo": Slo(normalized_latency_s=-1.0)}),
        ("--scale-lengths", {"shaping": Shaping(scale_lengths=0.0)}),
        ("--scale-tools", {"shaping": Shaping(scale_tools=float("inf"))}),
        ("--max-turns", {"shaping": Shaping(max_turns=0)}),
    ],
)
def test_a_bad_value_names_its_flag(flag, changes) -> None:
    values = {"url": "http://127.0.0.1:8000", "rate_per_s": 40.0, "duration_s": None, "count": 8}
    with pytest.raises(ConfigError, match=f"^{flag}"):
        BenchSettings(**values | changes)


def test_nothing_that_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-context: none of 1200"):
        BenchSettings(url="http://x", shaping=Shaping(max_context=1)).load()


async def command(*arguments):
    program = "from cluster.cli import main; main()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, "bench", *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_command_from_flags_to_files(cluster_double, tmp_path) -> None:
    code, out, err = await command(
        *("--url", cluster_double.url, "--policies", "vllm,continuum", "--count", 4, "--rate", 40, "--max-turns", 2),
        *("--scale-lengths", 0.02, "--scale-tools", 0, "--json", tmp_path / "o.jsonl", "--plots", tmp_path / "plots"),
    )
    assert code == 0, err
    assert "good programs/s" in out and "…" not in out
    for policy in ("vllm", "continuum"):
        assert f"block 1/1 {policy}: 0 of 4" in err and f"block 1/1 {policy}: 4 of 4 (4 ok)" in err
    assert f"Command: caesura bench --url {cluster_double.url}" in out
    assert [json.loads(line)["completed"] for line in (tmp_path / "o.jsonl").open()] == [4, 4]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "attainment.svg",
        "completion_cdf.svg",
        "goodput.svg",
        "per_token_cdf.svg",
        "ttft_cdf.svg",
    ]


async def test_the_command_fails_if_no_turn_was_served(cluster_double, tmp_path) -> None:
    cluster_double.misbehaviour.kind = "503"
    out = tmp_path / "out.jsonl"
    code, _, err = await command("--url", cluster_double.url, "--count", 2, "--quiet", "--json", out)
    assert (code, "Traceback" in err) == (2, False), err
    assert f"--url: {cluster_double.url} served no turn: " in err
    assert json.loads(out.read_text())["completed"] == 0


async def test_the_command_refuses_with_status_2(tmp_path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    for arguments, complaint in {
        ("--rate", 0): "--rate: 0.0 must be more than 0",
        ("--trace", tmp_path / "bad.jsonl"): "bad.jsonl:1: program_id: Field required",
        ("--json", tmp_path / "absent" / "o.jsonl"): "--json: ",
    }.items():
        code, _, err = await command(*arguments)
        assert (code, complaint in err, "Traceback" in err) == (2, True, False), err
