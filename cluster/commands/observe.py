"""`caesura observe`: proves on a real cluster and a real Prometheus that dashboards, rules and goodput hold."""

from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.config import CaesuraConfig
    from cluster.proof.observe import Findings

CONFIG: dict[str, Any] = {
    # No host tier, and memory for about 3,200 tokens a replica: programs compete for it.
    "replicas": {"count": 2, "host_bytes": 0},
    "engine": {"max_model_len": 3072, "num_gpu_blocks_override": 102, "max_num_seqs": 64},
    "slo": {"ttft_s": 2.0},
    # The client counts from when it meant to send; so does the cluster, then.
    "http": {"port": 0, "trust_request_start": True},
}

WRONG = 1
IMPOSSIBLE = 2


def observe(
    rate: Annotated[float, typer.Option(help="Programs a second.")] = 1.0,
    duration_s: Annotated[float, typer.Option(help="Seconds of arrivals.")] = 100.0,
    seed: Annotated[int, typer.Option(help="Same seed, same programs and arrivals.")] = 0,
    brief: Annotated[bool, typer.Option("--brief", help="Show only answers that will not do.")] = False,
) -> None:
    """Serve here under load, scrape with a real Prometheus, and ask it everything that dashboards and rules ask."""
    from rich.console import Console

    from cluster.bench.report import ProgressBar
    from cluster.commands.steps import timed_steps
    from cluster.demo.tools import notes_server
    from cluster.proof.observe import Load
    from cluster.proof.observe import observe as prove
    from cluster.proof.prometheus import INSTALL, PrometheusFailed, installed
    from cluster.serving import LocalCluster, StartFailed

    console = Console(highlight=False)
    if not installed():
        _stop(INSTALL)
    load = Load(rate_per_s=rate, duration_s=duration_s, seed=seed, ttft_s=CONFIG["slo"]["ttft_s"])
    console.print("Starting two vLLM replicas of the built-in random model on this machine, and a Prometheus:")
    try:
        with notes_server() as notes_url, LocalCluster(_config(notes_url), step=timed_steps(console)) as cluster:
            with ProgressBar(console, 1) as progress:
                findings = prove(cluster, load, progress)
            _print(findings, console, brief=brief)
    except (StartFailed, PrometheusFailed) as error:
        _stop(str(error))
    if findings.complaints:
        for complaint in findings.complaints:
            console.print(f"WRONG: {complaint}", markup=False, soft_wrap=True)
        raise typer.Exit(WRONG)
    console.print("Every panel and every rule has an answer, and the goodput is the client's.")


def _config(notes_url: str) -> "CaesuraConfig":
    from cluster.config import CaesuraConfig
    from cluster.demo.tools import tools

    return CaesuraConfig.model_validate({**CONFIG, "tools": tools(notes_url)})


def _stop(message: str) -> NoReturn:
    typer.echo(f"caesura observe: {message}", err=True)
    raise typer.Exit(IMPOSSIBLE)


def _print(findings: "Findings", console: "Console", *, brief: bool) -> None:
    from rich.table import Table

    table = Table("where", "what", "series", "answer", title="What was asked, with all variables at All")
    for one in findings.answers:
        if not (brief and one.verdict.will_do):
            table.add_row(one.where, one.what, str(one.series), f"{one.verdict} {one.told}".strip())
    console.print(table)
    counts: dict[str, int] = {}
    for one in findings.answers:
        counts[one.verdict.value] = counts.get(one.verdict.value, 0) + 1
    said = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    console.print(f"{len(findings.answers)} queries: {said}.")
    fine = sum(one.verdict.will_do for one in findings.through_ingress)
    console.print(f"Through the ingress's /metrics alone: {fine} of {len(findings.through_ingress)} have an answer.")
    if findings.silent_metrics:
        console.print(f"Metrics without a series in this run: {', '.join(findings.silent_metrics)}.", soft_wrap=True)
    goodput = Table("", "client", "Prometheus", "a second", "a second", "apart", title="Goodput, by both")
    for compared in findings.comparisons:
        goodput.add_row(
            compared.what,
            f"{compared.client:g}",
            f"{compared.prometheus:g}",
            f"{compared.client / compared.window_s:.4g}",
            f"{compared.prometheus / compared.window_s:.4g}",
            f"{100 * compared.error:.2f} %",
        )
    console.print(goodput)
