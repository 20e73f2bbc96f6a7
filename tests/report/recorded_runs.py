"""Small records whose numbers can be worked out by hand."""

from collections.abc import Iterator
from pathlib import Path

from cluster.offline.bench.record import Line, MemoryLine, PausePart, ProgramLine, RunLine, TurnPart, write

SLO = {"ttft_s": 1.0, "tpot_s": None, "e2e_s": None, "normalized_latency_s": 0.1}
POLICIES = ("vllm", "caesura")
RATES = (1.0, 2.0)
PROGRAMS = 40


def spread(mean: float) -> dict[str, float]:
    return {"mean": mean, "p50": mean * 0.8, "p95": mean * 2, "p99": mean * 3}


def summary(policy: str, rate: float) -> dict[str, object]:
    good = rate if policy == "caesura" else rate / 2
    return {
        "offered": PROGRAMS,
        "completed": PROGRAMS - 1,
        "goodput_programs": good,
        "goodput_requests": 3 * good,
        "attainment": good / rate,
        "ttft_s": spread(0.2 / good),
        "tpot_s": spread(0.02),
        "jct_s": spread(3.0 / good),
        "jct_wall_s": spread(9.0),
        "norm_latency_s": spread(0.05),
        "bubble_s": 0.5,
        "recomputed_tokens": 1200.0,
        "reused_tokens": 1800.0,
        "fetched_tokens": None,
    }


def run_line(number: int, policy: str, rate: float) -> RunLine:
    return RunLine(
        run=number,
        policy=policy,
        preset="live/tiny",
        rate=rate,
        seed=0,
        window_s=(0.0, 60.0),
        slo=SLO,
        summary=summary(policy, rate),
        versions={"caesura": "0.1.0", "vllm": "0.29.0"},
        command="caesura bench --policies vllm,caesura --record run.jsonl",
        capacity_tokens=10_000,
    )


def program_line(run: int, number: int, policy: str) -> ProgramLine:
    """Two turns; between them a pause of four seconds, half of it held, where the policy is ours."""
    at_s, wait_s = 1.5 * number, 0.1 if policy == "caesura" else 2.0 + number / 10
    first_end_s = at_s + wait_s + 1.0
    second_s = first_end_s + 4.0
    second_end_s = second_s + wait_s + 1.0
    held = (
        PausePart(first_end_s, first_end_s + 2.0, "held", "pays"),
        PausePart(first_end_s + 2.0, second_s, "released", "expired"),
    )
    ours = policy == "caesura"
    turns = (
        TurnPart(at_s, "ok", at_s + wait_s, first_end_s, wait_s, wait_s, 100, 20, 0, "held" * ours, "pays" * ours),
        TurnPart(second_s, "ok", second_s + wait_s, second_end_s, wait_s, wait_s, 140, 20, 60, "released" * ours),
    )
    jct_s = 2 * wait_s + 2.0
    return ProgramLine(
        run, f"{policy}-0-{number:05d}", at_s, "ok", ours, "math", jct_s, jct_s / 40, turns, held if ours else ()
    )


def lines() -> Iterator[Line]:
    pairs = [(rate, policy) for rate in RATES for policy in POLICIES]
    for number, (rate, policy) in enumerate(pairs):
        yield run_line(number, policy, rate)
        for program in range(PROGRAMS):
            yield program_line(number, program, policy)
        for second in range(0, 70, 2):
            held = 2000 if policy == "caesura" else 0
            yield MemoryLine(number, float(second), 5000, held, 1000, 4000 - held, 700)


def write_record(path: Path) -> Path:
    write(lines(), path)
    return path
