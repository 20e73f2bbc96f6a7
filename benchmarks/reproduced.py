"""Runs the figures of all papers, and keeps their results: ``python -m benchmarks.reproduced --traces FOLDER``.

Each figure is one call of `caesura reproduce`. Finished runs stay in ``.cache/reproduce``, so that an interrupted call
of this command goes on where it ended, and figures share the runs that are alike. A figure is kept in ``results/`` as
soon as it has ended. ``python -m benchmarks.papers`` writes the pages from what is kept.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers import keep
from cluster.offline.reproduce.plan import PAPERS, paper_of

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "reproduce"
PROGRAM = (sys.executable, "-c", "from cluster.cli import main; main()", "reproduce")


def main() -> int:
    """Run all that is chosen; exit status 1 if a figure failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces, NAME.jsonl.gz")
    parser.add_argument("--only", default="", help="papers or PAPER:FIGURE with commas, in the order of their runs")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--factors", default="", help="as of `caesura reproduce`, for figures that have them")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    arguments = parser.parse_args()
    try:
        chosen = chosen_figures(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    failed = []
    for paper, figure in chosen:
        print(f"== {paper} {figure}", flush=True)
        if reproduce(paper, figure, arguments):
            failed.append(f"{paper}:{figure}")
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return 1 if failed else 0


def chosen_figures(only: str) -> list[tuple[str, str]]:
    """Return papers and figures in the order of ``only``; empty text: all.

    Raises:
        ValueError: there is no such paper or figure; the message names the option.
    """
    known = {paper: list(paper_of(paper).figures) for paper in PAPERS}
    chosen: list[tuple[str, str]] = []
    for name in [part for part in only.split(",") if part] or PAPERS:
        paper, _, figure = name.partition(":")
        if paper not in known or (figure and figure not in known[paper]):
            raise ValueError(f"--only {name}: there are {', '.join(known.get(paper, known))}")
        chosen += [(paper, one) for one in known[paper] if figure in ("", one)]
    return chosen


def reproduce(paper: str, figure: str, arguments: argparse.Namespace) -> int:
    """Run a figure and keep its result. Return the exit status."""
    out = CACHE / f"{paper}_{figure}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    given = ["--traces", str(arguments.traces), "--seed", arguments.seeds, "--jobs", str(arguments.jobs)]
    given += ["--factors", factors] if (factors := factors_of(paper, figure, arguments.factors.split(","))) else []
    command = [*PROGRAM, paper, "--figure", figure, *given, "--resume", str(CACHE / "runs"), "--json", str(out)]
    status = subprocess.run([*command, "--quiet"], cwd=ROOT, check=False).returncode
    if not status:
        print(f"wrote {keep(out)}", flush=True)
    return status


def factors_of(paper: str, figure: str, named: Sequence[str]) -> str:
    """Return the value of ``--factors`` for a figure: those of ``named`` that it has, or ``all`` of them."""
    own = paper_of(paper).figures[figure].factors
    return ",".join(own) if "all" in named else ",".join(name for name in named if name in own)


if __name__ == "__main__":
    sys.exit(main())
