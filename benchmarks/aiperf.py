"""NVIDIA AIPerf's agentic-code sessions against a cluster of ours and against vLLM's own server, in one run.

    python -m benchmarks.aiperf [--rounds 3] [--sessions 64] [--concurrency 8] [--seed 7] [--out out/aiperf]

The load is not ours: `aiperf synthesize agentic-code` makes the sessions, `aiperf profile` sends them and measures.
Each session is a growing chat with pauses between its turns. AIPerf sends its id in the header ``x-session-id``, from
which a cluster knows the program; the cluster is asked afterwards for each of them. vLLM's own server gets the same
header.

Each server has one replica of the built-in model with the same engine arguments, in processes of its own. They take
turns, the order swapped each round, after a round that is not counted. Both get the same sessions in a round, and other
sessions in each round, so that no round finds the prompts of an earlier one in a cache. The figures are medians over
the rounds. AIPerf's own reports stay in the folder ``--out``. `make aiperf` installs AIPerf in an environment of its
own, and runs this.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.aiperf_report import ReportError, read_report, session_ids
from benchmarks.front_end import CONFIG, own_server
from benchmarks.peer_packages import SKIPPED
from benchmarks.results import save
from benchmarks.served import serve, served
from cluster.config.schema import CaesuraConfig
from replicas.tiny.model import tiny_model_directory

ROOT = Path(__file__).parents[1]
INSTALLED = ROOT / ".cache" / "peers" / "aiperf" / "bin" / "aiperf"
INSTALL = "make .cache/peers/aiperf/.installed"
COUNTED = ("requests", "sessions", "sessions_completed", "sessions_known", "failed_requests")
VLLM, CAESURA = "vllm", "caesura"
SESSION_HEADER = "x-session-id"
BLOCK_TOKENS = 64
SESSIONS: dict[str, Any] = {
    "new_tokens_per_turn": {"mean": 70, "median": 36, "max": 300},
    "generation_length": {"mean": 40, "median": 30, "max": 120},
    "inter_turn_delay": {
        "agentic_fraction": 0.7,
        "agentic_delay": {"mean": 250, "median": 180, "max": 1000},
        "human_delay": {"mean": 1500, "median": 1000, "max": 4000},
    },
    "turns": {"mean": 6, "median": 5, "min": 2, "max": 12, "allow_truncation": True},
    "max_prompt_tokens": 1600,
    "block_size": BLOCK_TOKENS,
    "cache": {
        "layer1_tokens": 320,
        "layer1_5_tokens": 192,
        "layer2": {"mean": 100, "median": 60, "max": 300},
        "layer1_5_groups": {"num_groups": 4, "zipf_alpha": 1.2},
    },
}
"""AIPerf's agentic-code sessions for a model of 2,048 tokens: its defaults for 200,000 with lengths divided by 50 to
100, human pauses by 25 and tool pauses by 10, and without resets. Delays are in ms."""
REPOSITORY, REVISION = "caesura/tiny", "0" * 40
"""The built-in model's name in a cache of Hugging Face's layout. AIPerf's offline workers load tokenizers by names
only, not from folders."""
TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class AiperfFailed(RuntimeError):
    """AIPerf ended with an error, with the end of its output in the message, or not in time."""


@contextmanager
def tokenizer_cache(model: Path) -> Iterator[dict[str, str]]:
    """Make a cache of Hugging Face's layout with the model's tokenizer, and yield the environment that names it."""
    with TemporaryDirectory(prefix="caesura-aiperf-") as home:
        repository = Path(home) / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
        snapshot = repository / "snapshots" / REVISION
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(REVISION)
        for name in TOKENIZER_FILES:
            (snapshot / name).write_bytes((model / name).read_bytes())
        yield {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


def aiperf(arguments: Sequence[str | Path], environment: Mapping[str, str], timeout_s: float) -> None:
    """Run AIPerf for ``timeout_s`` seconds at most.

    Raises:
        AiperfFailed: it has an exit status other than 0, or does not end in time.
    """
    command = [str(INSTALLED), *map(str, arguments)]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise AiperfFailed(f"{arguments[0]}: not done within {timeout_s:g} s (--timeout-s)") from error
    if done.returncode:
        raise AiperfFailed(
            f"{arguments[0]}: exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )


def synthesize(directory: Path, sessions: int, seed: int, timeout_s: float) -> Path:
    """Make a dataset of agentic-code sessions, and return its file. Raises: see `aiperf`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "config.json"
    config.write_text(json.dumps(SESSIONS, indent=2))
    known = set(directory.glob("*/dataset.jsonl"))
    aiperf(
        ["synthesize", "agentic-code", "--num-sessions", str(sessions), "--seed", str(seed), "--config", config,
         "--output", directory],
        {}, timeout_s,
    )  # fmt: skip
    (dataset,) = set(directory.glob("*/dataset.jsonl")) - known
    return dataset


def turns_of(dataset: Path) -> Counter[str]:
    """Return the number of turns of each session of a dataset."""
    return Counter(json.loads(line)["session_id"] for line in dataset.read_text().splitlines())


def profile(
    url: str,
    dataset: Path,
    directory: Path,
    concurrency: int,
    seed: int,
    environment: Mapping[str, str],
    timeout_s: float,
) -> dict[str, Any]:
    """Send the sessions to a server, ``concurrency`` at a time, and return the figures of `read_report`.

    Raises:
        AiperfFailed: see `aiperf`.
        ReportError: see `read_report`.
    """
    turns = turns_of(dataset)
    aiperf(
        ["profile", "--model", "tiny", "--url", url, "--endpoint-type", "chat", "--streaming",
         "--input-file", dataset, "--custom-dataset-type", "mooncake_trace", "--no-fixed-schedule",
         "--isl-block-size", str(BLOCK_TOKENS), "--conversation-num", str(len(turns)),
         "--session-header", SESSION_HEADER, "--concurrency", str(concurrency), "--random-seed", str(seed),
         "--tokenizer", REPOSITORY, "--use-server-token-count", "--extra-inputs", "ignore_eos:true",
         "--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", directory],
        environment, timeout_s,
    )  # fmt: skip
    return read_report(directory, turns)


def known_sessions(url: str, directory: Path) -> int:
    """Return how many of the sessions that AIPerf sent are programs of this cluster."""
    with httpx.Client(base_url=url) as http:
        answers = [http.get(f"/v1/programs/{name}", headers={SESSION_HEADER: name}) for name in session_ids(directory)]
    return sum(answer.is_success for answer in answers)


def compare(urls: Mapping[str, str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each server, with medians over the rounds and ratios to vLLM's own server.

    Raises:
        AiperfFailed, ReportError: see `profile`.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
    with tokenizer_cache(tiny_model_directory()) as environment:
        for number in range(-1, arguments.rounds):  # the first one warms up
            seed, directory = arguments.seed + number, arguments.out / f"round-{number}"
            sessions = arguments.sessions if number >= 0 else min(arguments.sessions, arguments.concurrency)
            dataset = synthesize(directory, sessions, seed, arguments.timeout_s)
            for name in list(urls) if number % 2 else list(reversed(list(urls))):
                result = profile(
                    urls[name], dataset, directory / name, arguments.concurrency, seed, environment, arguments.timeout_s
                )
                if name == CAESURA:
                    result["sessions_known"] = known_sessions(urls[name], directory / name)
                if number >= 0:
                    found[name].append(result)
    return [row_of(name, results, found[VLLM], arguments) for name, results in found.items()]


def row_of(
    name: str, results: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the row of a server: sums of counts, medians of other figures, and ratios to vLLM's own server."""
    counted = [key for key in COUNTED if key in results[0]]
    row: dict[str, Any] = {"subject": name, "concurrency": arguments.concurrency, "seed": arguments.seed}
    row |= {"rounds": len(results), "aiperf": results[0]["aiperf"], "complete": all(one["complete"] for one in results)}
    row |= {key: sum(one[key] for one in results) for key in counted}
    for key in (
        "requests_per_s",
        "tokens_per_s",
        "ttft_p50_ms",
        "ttft_p99_ms",
        "itl_p50_ms",
        "itl_p99_ms",
        "session_p50_s",
    ):
        values, base = ([one[key] for one in of if one[key] is not None] for of in (results, own))
        row[key] = statistics.median(values) if values else None
        row[f"{key}_x_vllm"] = row[key] / statistics.median(base) if values and base else None
    return row


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table of at most 100 columns."""
    table = Table("subject", "requests/s", "TTFT ms p50, p99", "ITL ms p50, p99", "sessions done", "session s p50")
    for row in rows:
        table.add_row(
            row["subject"],
            f"{row['requests_per_s']:.2f} ({row['requests_per_s_x_vllm']:.2f}x)",
            f"{row['ttft_p50_ms']:.0f}, {row['ttft_p99_ms']:.0f} ({row['ttft_p50_ms_x_vllm']:.2f}x)",
            f"{row['itl_p50_ms']:.1f}, {row['itl_p99_ms']:.1f} ({row['itl_p50_ms_x_vllm']:.2f}x)",
            f"{row['sessions_completed']} of {row['sessions']}",
            "-" if row["session_p50_s"] is None else f"{row['session_p50_s']:.1f}",
        )
    Console(width=100).print(table)


def main() -> int:
    """Measure, print, save. Return 77 without AIPerf, and 1 if it fails or a session is not complete or not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=64, help="sessions of a round")
    parser.add_argument("--concurrency", type=int, default=8, help="sessions under way at a time")
    parser.add_argument(
        "--seed", type=int, default=7, help="of the first round's sessions; each round has the next one"
    )
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one call of AIPerf")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "aiperf", help="folder of AIPerf's reports")
    parser.add_argument("--result", type=Path, default=None, help="file of the rows; default: benchmarks/results")
    parser.add_argument("--serve", choices=(CAESURA,), default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(CaesuraConfig.model_validate({**CONFIG, "http": {"port": 0}}))
        return 0
    if min(arguments.rounds, arguments.sessions, arguments.concurrency) < 1:
        parser.error("--rounds, --sessions, --concurrency: 1 at least")
    if not INSTALLED.exists():
        print(
            f"skipped: AIPerf is not installed in {INSTALLED.relative_to(ROOT).parents[1]}; install it with: {INSTALL}"
        )
        return SKIPPED
    try:
        with ExitStack() as stack:
            urls = {VLLM: stack.enter_context(own_server(tiny_model_directory())).url}
            urls[CAESURA] = stack.enter_context(served("aiperf", CAESURA))
            rows = compare(urls, arguments)
    except (AiperfFailed, ReportError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    show(rows)
    print(f"AIPerf's reports: {arguments.out}")
    save("aiperf", rows, arguments.result)
    ours = next(row for row in rows if row["subject"] == CAESURA)
    whole = ours["sessions_completed"] == ours["sessions_known"] == ours["sessions"]
    return 0 if ours["complete"] and whole else 1


if __name__ == "__main__":
    sys.exit(main())
