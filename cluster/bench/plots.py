"""PNG plots of a run: how TTFT and job completion time are distributed, and goodput."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from cluster.bench.result import BenchResult
from cluster.bench.summary import by_block, by_policy
from cluster.goodput import Outcome

SIZE_INCHES = (7.0, 4.5)
DOTS_PER_INCH = 130


def write_plots(result: BenchResult, folder: Path) -> list[Path]:
    """Write ``ttft_cdf.png``, ``jct_cdf.png`` and ``goodput.png`` into ``folder``, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    policies = result.settings.policy_names
    measured = {
        policy: [program for block in result.blocks if block.policy == policy for program in block.measured]
        for policy in policies
    }
    ttft = {
        policy: [t.ttft_s for p in programs for t in p.turns if t.outcome is Outcome.OK and t.ttft_s is not None]
        for policy, programs in measured.items()
    }
    jct = {policy: [p.jct_s for p in programs if p.jct_s is not None] for policy, programs in measured.items()}
    return [
        _cdf(folder / "ttft_cdf.png", "TTFT from the intended start, s", ttft),
        _cdf(folder / "jct_cdf.png", "job completion time without tools, s", jct),
        _goodput(folder / "goodput.png", result),
    ]


def _cdf(path: Path, label: str, samples: dict[str, list[float]]) -> Path:
    figure, axes = pyplot.subplots(figsize=SIZE_INCHES)
    for policy, values in samples.items():
        if values:
            axes.ecdf(values, label=f"{policy} (n={len(values)})")
    if any(value > 0 for values in samples.values() for value in values):
        axes.set_xscale("log")
        axes.legend(loc="lower right")
    axes.set(xlabel=label, ylabel="fraction", ylim=(0, 1))
    axes.grid(visible=True, alpha=0.3)
    return _saved(figure, path)


def _goodput(path: Path, result: BenchResult) -> Path:
    summaries = by_policy(result)
    names = [summary.policy for summary in summaries]
    figure, axes = pyplot.subplots(figsize=SIZE_INCHES)
    axes.bar(names, [summary.goodput.programs_per_s for summary in summaries], width=0.5, label="all blocks")
    for name in names:
        blocks: Sequence[float] = [block.goodput.programs_per_s for block in by_block(result, name)]
        axes.plot([name] * len(blocks), blocks, "k.", label="one block" if name == names[0] else None)
    axes.axhline(result.settings.rate_per_s, color="grey", linestyle="--", label="offered")
    axes.set(ylabel="good programs per second")
    axes.legend()
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)
    return path
