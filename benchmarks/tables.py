"""Runs everything behind the tables again, from one commit: ``python -m benchmarks.tables --traces FOLDER``.

`tables.yaml` has the simulated runs. Each call of `caesura simulate` has one policy and one seed, so that an
interrupted run of this command goes on where it ended: finished calls stay in ``.cache/tables`` under the state of the
simulated code. A result has this state, too, so that another machine goes on from what is in ``results/``, where
`UNFINISHED` has the calls of seeds that have not ended with every policy. All tables
come with the first seed, then all with the second; ``--seeds`` limits the seeds. Then come the comparisons of
`AFTERWARDS`, and the pages. ``--quick`` simulates a minute for each policy and writes to ``out/tables``.
"""

import argparse
import ast
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import DIRECTORY

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "tables"
UNFINISHED = "unfinished_tables.jsonl"
QUICK_OUT = ROOT / "out" / "tables"
SIMULATED = (
    *(
        "cluster/api",
        "cluster/auth",
        "cluster/config",
        "cluster/core",
        "cluster/durations",
        "cluster/observing",
        "cluster/offline/bench",
        "cluster/offline/commands",
        "cluster/offline/report",
        "cluster/offline/simulator",
    ),
    *("predictor_service", "replicas", "router"),
)
"""Folders whose content decides the results: all that `caesura simulate` imports."""
AFTERWARDS = (
    "benchmarks.silicon",
    "benchmarks.reproduced --traces {traces}",
    "benchmarks.deviations --traces {traces}",
    "benchmarks.sensitivity --trace {traces}/infercept_merge.jsonl.gz --seed {seeds}",
    "benchmarks.router",
    "benchmarks.other_simulator --trace {traces}/iso_bench_trae.jsonl.gz --alone",
    "benchmarks.dynamo_router --trace {traces}/kvtester_cc.jsonl.gz --replicas 16 --seeds 0,1,2",
    "benchmarks.peer_routers",
    "benchmarks",
)
"""Modules that run after the simulated tables, one at a time. The last one is all micro-benchmarks, AIPerf's load among
them. The packages of peers have to be importable: `make tables` installs them."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `caesura simulate`: the runs of one policy with one seed."""

    table: str
    policy: str
    seed: int
    arguments: tuple[str, ...]

    def stored(self, folder: Path) -> Path:
        """Return the file of its lines in a folder. Its name has the arguments, so that other arguments run again."""
        named = ("--trace", Path(self.arguments[1]).name, *self.arguments[2:])
        digest = sha256(shlex.join(named).encode()).hexdigest()[:8]
        return folder / f"{self.table}.{self.policy}.{self.seed}.{digest}.jsonl"


def main() -> int:
    """Run all that is missing; exit status 1 if a call failed or a benchmark missed its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces, NAME.jsonl.gz")
    parser.add_argument("--only", default="", help="names of simulated tables, with commas; nothing else is run")
    parser.add_argument("--seeds", default="", help="only these seeds, with commas, and nothing after the simulations")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    parser.add_argument("--quick", action="store_true", help="a minute for each policy, into out/tables")
    arguments = parser.parse_args()
    plan = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())
    try:
        calls = list(calls_of(plan, arguments.traces, arguments.only, quick=arguments.quick))
        seeds = seeds_of(arguments.seeds, calls)
    except ValueError as error:
        parser.error(str(error))
    made = {"state": state(), "commit": simulated_commit(), "date": datetime.now(UTC).date().isoformat()}
    folder = CACHE / made["state"]
    folder.mkdir(parents=True, exist_ok=True)
    out = QUICK_OUT if arguments.quick else DIRECTORY
    restore(calls, folder, out, made["state"])
    failed = run_all([call for call in calls if call.seed in seeds], folder, arguments.jobs)
    for name in dict.fromkeys(call.table for call in calls):
        if path := collect([call for call in calls if call.table == name], folder, out, made):
            print(f"wrote {path}", flush=True)
    if not (arguments.quick or arguments.only):
        keep_unfinished(calls, folder, out, made)
    missed = sorted(failed)
    if not (arguments.only or arguments.quick or arguments.seeds):
        missed += afterwards(folder, {"traces": str(arguments.traces), "seeds": ",".join(map(str, plan["seeds"]))})
        for page in ("benchmarks.papers", "benchmarks.readme", "benchmarks.frontier"):
            subprocess.run([sys.executable, "-m", page], cwd=ROOT, check=True)
    if missed:
        print(f"Failed, or a target was missed: {', '.join(missed)}")
    return 1 if missed else 0


def calls_of(plan: Mapping[str, Any], traces: Path, only: str, *, quick: bool) -> Iterator[Call]:
    """Yield the calls of all tables, or of those that ``only`` names.

    Raises:
        ValueError: a table or a trace does not exist; the message names the option.
    """
    names = [name for name in only.split(",") if name] or list(plan["runs"])
    for name in names:
        if name not in plan["runs"]:
            raise ValueError(f"--only {name}: there are {', '.join(plan['runs'])}")
        if not trace_of(plan["runs"][name], traces).is_file():
            raise ValueError(f"--traces: there is no {trace_of(plan['runs'][name], traces)}")
    for seed in plan["quick"]["seeds"] if quick else plan["seeds"]:
        for name in names:
            spec = plan["runs"][name]
            more = shlex.split(spec["arguments"]) + (shlex.split(plan["quick"]["arguments"]) if quick else [])
            rates = spec["rates"].split(",")[-1] if quick else spec["rates"]
            for policy in spec["policies"]:
                named = ("--trace", str(trace_of(spec, traces)), "--rates", rates)
                parameters = {**plan.get("parameters", {}), **spec.get("parameters", {})}
                own = shlex.split(parameters.get(policy, ""))
                yield Call(name, policy, seed, (*named, "--policies", policy, "--seed", str(seed), *more, *own))


def trace_of(spec: Mapping[str, Any], traces: Path) -> Path:
    """Return the path of a table's trace."""
    return traces / f"{spec['trace']}.jsonl.gz"


def seeds_of(text: str, calls: Sequence[Call]) -> set[int]:
    """Return the seeds that ``--seeds`` names; empty text: all.

    Raises:
        ValueError: there is no call with such a seed; the message names the option.
    """
    known = {call.seed for call in calls}
    seeds = {int(one) if one.isdecimal() else -1 for one in text.split(",")} if text else known
    if not seeds <= known:
        raise ValueError(f"--seeds {text}: there are {', '.join(map(str, sorted(known)))}")
    return seeds


def state() -> str:
    """Return a name for the simulated code as it is now, changed files included.

    Comments and docstrings do not change it.
    """
    digest = sha256()
    tracked = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *SIMULATED]
    listed = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in sorted(filter(None, listed.split("\0"))):
        path = ROOT / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + meaning(path) + b"\0")
    return digest.hexdigest()[:12]


def meaning(path: Path) -> bytes:
    """Return what decides how a file behaves: the syntax of a Python module without docstrings, else all content."""
    if path.suffix != ".py":
        return path.read_bytes()
    module = ast.parse(path.read_bytes())
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not is_text(one)]
    return ast.dump(module).encode()


def is_text(node: ast.stmt) -> bool:
    """Return whether a statement is only a text: a docstring, or the description of a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def simulated_commit() -> str:
    """Return the last commit that changed the simulated code, with ``+`` if it has changed since."""

    def git(*arguments: str) -> str:
        asked = ["git", *arguments, "--", *SIMULATED]
        return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h") + ("+" if git("status", "--porcelain") else "")


def restore(calls: Sequence[Call], folder: Path, kept: Path, now: str) -> None:
    """Take the lines of calls that ``folder`` lacks from the results in ``kept``, if they are of the state ``now``."""
    lines: dict[str, list[str]] = {}
    for name in (*dict.fromkeys(f"{call.table}.jsonl" for call in calls), UNFINISHED):
        path = kept / name
        for line in path.read_text().splitlines() if path.exists() else ():
            content = json.loads(line)
            if content.get("state") == now:
                lines.setdefault(content["call"], []).append(line)
    for call in calls:
        stored = call.stored(folder)
        if stored.name in lines and not stored.exists():
            stored.write_text("".join(f"{line}\n" for line in lines[stored.name]))


def run_all(calls: Sequence[Call], folder: Path, jobs: int) -> set[str]:
    """Run the calls that ``folder`` lacks, and return the names of the tables in which one failed."""
    missing = [call for call in calls if not call.stored(folder).exists()]
    print(f"{len(calls)} calls of caesura simulate, {len(calls) - len(missing)} of them done before", flush=True)
    failed: set[str] = set()
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, call, folder): call for call in missing}
        for number, ended in enumerate(as_completed(running), start=1):
            call = running[ended]
            error = ended.result()
            print(f"{number}/{len(missing)} {call.table} {call.policy} seed {call.seed}{error}", flush=True)
            if error:
                failed.add(call.table)
    return failed


def run(call: Call, folder: Path) -> str:
    """Run one call and keep its lines. Return the end of its error output; empty if it succeeded."""
    target = call.stored(folder)
    partial = target.with_suffix(".partial")
    program = (sys.executable, "-c", "from cluster.cli import main; main()", "simulate", *call.arguments)
    ended = subprocess.run(
        [*program, "--quiet", "--json", str(partial)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        return f": exit status {ended.returncode}: {ended.stderr[-500:]}"
    partial.rename(target)
    return ""


def collect(calls: Sequence[Call], folder: Path, out: Path, made: Mapping[str, str]) -> Path | None:
    """Write the lines of a table's calls to one file, with the command, and with ``made`` where a line has none yet.

    Only seeds with which all calls have ended are written. Return the path; None: there is no such seed.
    """
    missing = {call.seed for call in calls if not call.stored(folder).exists()}
    lines = [line for call in calls if call.seed not in missing for line in lines_of(call, folder, made)]
    if not lines:
        return None
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{calls[0].table}.jsonl"
    path.write_text("".join(lines))
    return path


def keep_unfinished(calls: Sequence[Call], folder: Path, out: Path, made: Mapping[str, str]) -> None:
    """Write the lines of the calls that :func:`collect` leaves out, so that another machine can go on from them."""
    missing = {(call.table, call.seed) for call in calls if not call.stored(folder).exists()}
    left = [call for call in calls if (call.table, call.seed) in missing and call.stored(folder).exists()]
    path = out / UNFINISHED
    if left:
        path.write_text("".join(line for call in left for line in lines_of(call, folder, made)))
    else:
        path.unlink(missing_ok=True)


def lines_of(call: Call, folder: Path, made: Mapping[str, str]) -> Iterator[str]:
    """Yield the JSON lines of a call that has ended, with ``made`` where a line has none yet."""
    trace = call.arguments[1]
    command = shlex.join(["caesura", "simulate", *call.arguments]).replace(trace, Path(trace).name)
    own = {"command": command, "call": call.stored(folder).name}
    for line in call.stored(folder).read_text().splitlines():
        yield json.dumps({**made, **json.loads(line), **own}) + "\n"


def afterwards(folder: Path, names: Mapping[str, str]) -> list[str]:
    """Run each of `AFTERWARDS` that has not succeeded in this state, and return those that miss a target."""
    missed = []
    for text in AFTERWARDS:
        module, *more = shlex.split(text.format(**names))
        done = folder / f"{module}.{sha256(shlex.join(more).encode()).hexdigest()[:8]}.done"
        if done.exists():
            continue
        print(f"\n== python -m {module}", flush=True)
        if subprocess.run([sys.executable, "-m", module, *more], cwd=ROOT, check=False).returncode:
            missed.append(module)
        else:
            done.touch()
    return missed


if __name__ == "__main__":
    sys.exit(main())
