"""Which families of models Caesura serves with all features, from the tests that `make models` ran.

Without an argument it writes the page again from the kept results.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.results import DIRECTORY, kept_rows, save, vllm_version
from cluster.config.model_features import EFFECTS, Feature
from cluster.offline.reference.pages import code, page, table

NAME = "model_families"
PAGE = DIRECTORY.parents[1] / "docs" / "models.md"
INTRODUCTION = """\
`caesura config check` reports which features are off for your model, if its `config.json` is on this machine.

`make models` runs a tiny checkpoint with random weights of each family on vLLM's CPU engine. A program pauses twice.
Its KV is held, or offloaded and loaded by the next turn, or offloaded and prefetched when the tool ends. Each time, the
tokens must be those of a program whose KV was discarded and computed again, and no block may be left over. Then six
programs that do not fit together run at the same time. GPUs have other kernels, and were not tested."""
HEAD = ("models", "layers", "KV cache groups", "held", "offloaded", "prefetched", "off", "tests")
MEANINGS = "\n".join(["What is off means:", "", *(f"- {feature}: {EFFECTS[feature]}." for feature in Feature)])
LIMITS = """\
If a model has layers with a window or a state, a program's KV is of use up to its end or not at all: a smaller part
lacks the window or the state. A hold is therefore evicted as a whole.
The block size of such models can be several hundred tokens, and a context that is shorter than a block is not reused.

A drafter that reads the model's hidden states (`method: eagle`, `eagle3`, `mtp`, `dflash` or `dspark`) needs those of
the last block of a reused context, so that vLLM computes this block again.

A context with an image is tested with Idefics 3. Held, offloaded and prefetched, it gives the same tokens.
A prompt with another image in the same place reuses nothing from there on.
A cluster serves it, too: all routes show the model the same image, and it reads the images of tools' answers.
The same cluster serves two LoRA adapters, whose tokens are those of vLLM's own engine.

Not tested, because vLLM 0.29 cannot run them on CPU:

- Mamba 1 and Jamba: the kernel of the Mamba 1 convolution does not work.
- LFM2: the kernel of the short convolution supports a width of 4 only, and these models have 3.
- Qwen3.5 and other models whose module imports torchvision, which is not installed with the CPU build.
- DeepSeek V3.2 (sparse MLA): vLLM has no sparse attention on CPU. MLA with prefix caching needs a GPU or AMX.
- Bamba: vLLM has removed it.

`replicas.data_parallel_size` and `engine.enable_expert_parallel` use Ray Serve LLM's data parallel servers. Their
configuration is tested, but no such replica was started."""


def rows_of(report: Path) -> list[dict[str, Any]]:
    """Return one row for each family, from pytest's JUnit report.

    Raises:
        ValueError: the report has no tests of families.
    """
    rows: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("name", "")
        if "[" not in name:
            continue
        row = rows.setdefault(name.partition("[")[2].removesuffix("]"), {"passed": 0, "failed": 0})
        row["failed" if case.find("failure") is not None or case.find("error") is not None else "passed"] += 1
        row |= {one.get("name", ""): one.get("value") for one in case.iter("property")}
    rows = {name: row for name, row in rows.items() if "layers" in row}
    if not rows:
        raise ValueError(f"{report}: no family was tested")
    return list(rows.values())


def families_page(rows: Sequence[Mapping[str, Any]], version: str) -> str:
    """Return the page.

    Args:
        rows: the results, one for each family.
        version: the version of vLLM that was tested.
    """
    tested = f"Tested on vLLM {code(version)}. The numbers are tokens of the second and third prompt that were reused."
    return page("Models", INTRODUCTION, tested, table(HEAD, _cells(rows)), MEANINGS, LIMITS)


def _cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        reused = (_reused(row.get(pause)) for pause in ("held", "swapped", "fetched"))
        tests = f"{row['passed']} passed" + (f", {row['failed']} failed" if row["failed"] else "")
        yield (row["models"], row["layers"], str(row.get("groups", "")), *reused, row.get("off") or "nothing", tests)


def _reused(value: str | None) -> str:
    """Return the numbers of a recorded list, without that of the first turn."""
    return "failed" if value is None else ", ".join(value.strip("[]").split(", ")[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Record a report, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, nargs="?", help="pytest's JUnit report of tests/models")
    arguments = parser.parse_args(argv)
    rows: Sequence[Mapping[str, Any]] = kept_rows(NAME)
    if arguments.report is not None:
        rows = [{**row, "vllm": vllm_version()} for row in rows_of(arguments.report)]
        save(NAME, rows)
    PAGE.write_text(families_page(rows, rows[0]["vllm"] if rows else ""), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
