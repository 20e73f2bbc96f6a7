"""Shows the results of a benchmark: a comparison of the policies, a table of the blocks, and footnotes."""

import json
from collections import Counter
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from cluster.offline.bench.metrics import COMPLETION, shown
from cluster.offline.bench.results import BenchResult, as_json, by_block, by_policy
from cluster.offline.bench.terminal import print_comparison, print_table


def print_report(result: BenchResult, console: Console, *, verbose: bool = False) -> None:
    """Print the comparison, the blocks, the errors, the dropped programs and the command."""
    settings = result.settings
    title = f"{result.workload.name} on {result.model}: {settings.rate_per_s:g} programs/s, {settings.arrivals}"
    columns = {summary.policy: [as_json(summary, result)] for summary in by_policy(result)}
    print_comparison(title, columns, console, verbose=verbose)
    if settings.blocks > 1:
        print_table(_blocks_table(result), console)
    for line in _footnotes(result, verbose=verbose):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def write_json_lines(result: BenchResult, path: Path) -> None:
    """Write one JSON object for each policy, each on a line."""
    lines = [json.dumps(as_json(summary, result)) for summary in by_policy(result)]
    path.write_text("".join(f"{line}\n" for line in lines))


def _blocks_table(result: BenchResult) -> Table:
    table = Table(title="Block by block (the noise)", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for column in ("policy", "block", "good/s", "in SLO, %", "TTFT mean, s", "completion mean, s", "p95, s"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in result.settings.policy_names:
        for number, summary in enumerate(by_block(result, policy), start=1):
            ttft_s, spent_s = (summary.distributions[name] for name in ("ttft_all_s", "completion_all_s"))
            goodput = summary.goodput
            attained = None if goodput.attainment is None else 100 * goodput.attainment
            values = (goodput.programs_per_s, attained, ttft_s.mean, spent_s.mean, spent_s.p95)
            table.add_row(policy, str(number), *map(shown, values))
    return table


def _footnotes(result: BenchResult, *, verbose: bool) -> list[str]:
    settings, workload = result.settings, result.workload
    lines = [COMPLETION]
    lines += [] if verbose else ["All that was measured: --verbose, or the lines of --json."]
    lines.append(f"Programs in the pool: {len(workload.programs)}.")
    if workload.dropped:
        lines.append(f"Dropped, because they need more than {settings.shaping.max_context} tokens: {workload.dropped}.")
    lines += [f"Note: {note}." for note in workload.notes]
    warmup = Counter(program.outcome for block in result.blocks for program in block.warmup)
    if warmup:
        counts = ", ".join(f"{count} {outcome.value}" for outcome, count in warmup.items())
        lines.append(f"In the warm-up, not measured: {sum(warmup.values())} programs ({counts}).")
    errors = Counter(
        (block.policy, turn.error)
        for block in result.blocks
        for program in (*block.warmup, *block.measured)
        for turn in program.turns
        if turn.error is not None
    )
    lines += [f"Error, {policy}, {count} times: {error}" for (policy, error), count in errors.most_common(5)]
    if settings.command:
        lines.append(f"Command: {settings.command}")
    return lines
