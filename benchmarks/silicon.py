"""Step times that the presets predict, against measurements of GPUs that were not fitted.

``python -m benchmarks.silicon`` compares by device, model, phase, batch, context and number of tensor-parallel ranks,
and draws a plot; exit status 1 if a target is missed. ``--fit`` makes the fits in `replicas/silicon` again first.
Nothing is measured here: `replicas/silicon/README.md` names the public sources, and `benchmarks.gpu_steps` measured the
steps and copies of the source `gpu_steps`, none of which is ever fitted.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import gpu_results
from benchmarks.results import save
from replicas.presets import DEVICES, FITS, MODELS, WORKING_BYTES, efficiency
from replicas.silicon.fit import FIT_NAMES, DeviceFit, Errors, Group, fit_device, write_fits
from replicas.silicon.measurements import Measurement, all_reduce_s, load, predicted_s

PLOT = Path(__file__).parent.parent / "docs" / "images" / "silicon.png"
PHASES = ("decode", "prefill", "mixed")
MOST_ERROR, LEAST_P10, MOST_P90 = 0.1, 0.75, 1.25
TARGETS = {
    ("llama-3.1-8b", "llama-3.1-70b"): ("a100-80", "h100", "h200", "b200"),
    ("opt-13b", "vicuna-13b"): ("a100-80", "h100"),
}
"""Models and devices whose steps of each phase must be predicted within the limits above."""
LIMITS = {"batch": (1, 8, 64), "context": (0, 2048, 8192)}
"""Upper bounds of the classes of batch and context; the last class has no bound."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="make the fits in replicas/silicon again first")
    arguments = parser.parse_args()
    if arguments.fit:
        write_fits()
        efficiency.cache_clear()
    measured = [*load(), *gpu_results.measurements()]
    fits = [fit_device(name, measured) for name in FIT_NAMES]
    rows = [*steps(fits), *all_reduces(measured), *capacities(), *gpu_results.copies(), *gpu_results.additions()]
    show(rows)
    missed = [row for row in rows if row.get("targeted") and not row["reached"]]
    for row in missed:
        print(f"missed: {row['device']} {row['model']} {row['phase']}")
    print(f"wrote {save('silicon', rows)} and {plot(fits)}")
    return 1 if missed else 0


def steps(fits: Iterable[DeviceFit]) -> list[dict[str, Any]]:
    """Return the errors of held-out rows: one row for each group, and for each class of batch and of context."""
    rows: list[dict[str, Any]] = []
    for fit in fits:
        # The file's efficiency is what presets use.
        ratios = [(row, predicted_s(row, efficiency(fit.name)) / row.seconds) for row in fit.held_out]
        for group, errors in fit.errors().items():
            named = {"by": "group", "fit": fit.name, **group._asdict(), **asdict(errors)}
            rows.append(named | {"targeted": targeted(group), "reached": reached(errors)})
        own = [(row, ratio) for row, ratio in ratios if row.source == fit.fitted[0].source and row.kind in PHASES]
        for axis in LIMITS:
            rows += by_class(fit.name, axis, own)
    return rows


def targeted(group: Group) -> bool:
    """Return whether the targets are meant for a group."""
    devices = next((devices for models, devices in TARGETS.items() if group.model in models), ())
    usual = group.device in devices and group.ranks == MODELS[group.model].tensor_parallel
    return usual and group.phase in PHASES and group.source == "aic"


def reached(errors: Errors) -> bool:
    """Return whether errors are within the targets."""
    return errors.error <= MOST_ERROR and errors.p10 >= LEAST_P10 and errors.p90 <= MOST_P90


def by_class(fit: str, axis: str, ratios: Iterable[tuple[Measurement, float]]) -> list[dict[str, Any]]:
    """Return the errors of each phase and each class of batch or context."""
    classes: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row, ratio in ratios:
        value = getattr(row, axis)
        classes[row.kind, sum(value > limit for limit in LIMITS[axis])].append(ratio)
    return [
        {"by": axis, "fit": fit, "phase": phase, axis: class_name(axis, index), **asdict(Errors.of(found))}
        for (phase, index), found in sorted(classes.items())
    ]


def class_name(axis: str, index: int) -> str:
    limits = LIMITS[axis]
    return f"above {limits[-1]:,}" if index == len(limits) else f"up to {limits[index]:,}"


def all_reduces(measured: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Return the errors of all-reduces alone, by device and number of ranks. Those of four ranks are fitted."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in measured:
        if row.kind == "all_reduce":
            efficient = efficiency(DEVICES[row.gpu].measured_on)
            groups[row.gpu, row.tp].append(all_reduce_s(row, efficient) / row.seconds)
    return [
        {"by": "all_reduce", "device": device, "ranks": ranks, **asdict(Errors.of(ratios))}
        for (device, ranks), ratios in sorted(groups.items())
    ]


def capacities() -> list[dict[str, Any]]:
    """Return the tokens of KV that engines reported, and those that the rule of the presets gives for them."""
    with (FITS / "kv_capacity.csv").open(newline="", encoding="utf-8") as file:
        reported = list(csv.DictReader(file))
    rows = []
    for engine in reported:
        share, ranks = float(engine["gpu_memory_utilization"]), int(engine["tp"])
        usable = ranks * (DEVICES[engine["gpu"]].memory_bytes * share - WORKING_BYTES)
        tokens = int((usable - float(engine["weight_bytes"])) / float(engine["kv_bytes_per_token"]))
        names = {name: engine[name] for name in ("gpu", "model", "engine", "source")}
        ratio = round(tokens / int(engine["kv_tokens"]), 3)
        rows.append({"by": "kv", **names, "reported": int(engine["kv_tokens"]), "predicted": tokens, "ratio": ratio})
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as tables, one for each kind."""
    columns: dict[str, Sequence[str]] = {
        "group": ("device", "source", "engine", "model", "ranks", "phase"),
        "batch": ("fit", "phase", "batch"),
        "context": ("fit", "phase", "context"),
        "all_reduce": ("device", "ranks"),
        "copy": ("device", "model", "how", "to"),
    }
    for by, names in columns.items():
        print(f"\nPredicted over measured, by {by}: median, median error, p10, p90")
        for row in rows:
            if row["by"] == by:
                cells = " ".join(f"{row[name]!s:<{max(12, len(name))}}" for name in names)
                numbers = " ".join(f"{row[name]:6.2f}" for name in ("ratio", "error", "p10", "p90"))
                print(f"  {cells} {row['rows']:4} {numbers} {mark(row)}")
    print(
        "\nPredicted over measured, mixed steps at rest: mixed, its prompt alone; measured ms: mixed, prompt + decodes"
    )
    for row in rows:
        if row["by"] == "addition":
            step = f"{row['device']:10} {row['model']:18} {row['prompt']:5} {row['before']:6} {row['decodes']:8}"
            print(f"  {step} {row['ratio']:.3f} {row['prompt_ratio']:.3f} {row['ms']:7.2f} {row['sum_ms']:7.2f}")
    print("\nTokens of KV: reported, predicted, ratio")
    for row in rows:
        if row["by"] == "kv":
            print(
                f"  {row['gpu']:10} {row['model']:18} {row['reported']:10,} {row['predicted']:10,} {row['ratio']:.3f}"
            )


def mark(row: dict[str, Any]) -> str:
    if "reached" not in row:
        return ""
    return ("reached" if row["reached"] else "missed") + (" (target)" if row["targeted"] else "")


def plot(fits: Sequence[DeviceFit], path: Path = PLOT) -> Path:
    """Draw predicted over measured times of all held-out rows over the measured time, a panel for each fit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(11, 6.2), sharex=True, sharey=True)
    kinds: dict[str, Callable[[Measurement], bool]] = {
        "decode": lambda row: row.kind == "decode",
        "prefill": lambda row: row.kind == "prefill",
        "mixed": lambda row: row.kind == "mixed",
        "live engine": lambda row: row.kind == "served" or row.kind.endswith("e2e"),
        "layers only": lambda row: row.kind == "layers_without_attention",
    }
    for axes, fit in zip(panels.flat, fits, strict=True):
        axes.axhspan(0.9, 1.1, color="0.85")
        axes.axhline(1, color="0.5", linewidth=0.8)
        for (label, chosen), colour in zip(kinds.items(), ("C0", "C3", "C2", "C1", "C4"), strict=True):
            rows = [row for row in fit.held_out if chosen(row)]
            ratios = [predicted_s(row, efficiency(fit.name)) / row.seconds for row in rows]
            axes.scatter([1e3 * row.seconds for row in rows], ratios, s=9, color=colour, label=label, alpha=0.7)
        axes.set(title=fit.name, xscale="log", ylim=(0.2, 1.6))
    for axes in panels[1]:
        axes.set_xlabel("measured, ms")
    for axes in panels[:, 0]:
        axes.set_ylabel("predicted / measured")
    panels[0, 0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())
