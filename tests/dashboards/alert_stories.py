"""For each alert, what Prometheus sees when it has to fire and when it must not, as `promtool test rules` takes it."""

from dataclasses import dataclass

from cluster.metrics import PREFIX

Series = dict[str, str]
"""Selector without our prefix to values in promtool's notation."""


@dataclass(frozen=True)
class Story:
    """``at`` the alert fires with ``fires``, and does not with ``quiet``."""

    alert: str
    at: str
    fires: Series
    quiet: Series
    interval: str = "1m"


def turns(good: int, *, of: int = 60, length: int = 400) -> Series:
    return {
        'requests_total{model="m",tenant="t",outcome="ok"}': f"0+{of}x{length}",
        'good_requests_total{model="m",tenant="t"}': f"0+{good}x{length}",
    }


def programs(good: int, *, of: int = 60, length: int = 400) -> Series:
    return {
        'program_ends_total{model="m",tenant="t",verdict="good"}': f"0+{good}x{length}",
        'program_ends_total{model="m",tenant="t",verdict="late"}': f"0+{of - good}x{length}",
    }


def refusals(refused: int) -> Series:
    return {
        'refusals_total{model="m",reason="hopeless"}': f"0+{refused}x60",
        'placements_total{model="m",reason="new"}': f"0+{100 - refused}x60",
    }


def calls(ok: int) -> Series:
    return {
        'tool_calls_total{tool="book",outcome="ok"}': f"0+{ok}x60",
        'tool_calls_total{tool="book",outcome="failed"}': f"0+{10 - ok}x60",
    }


def memory(recomputed: int, broken: int) -> Series:
    return {
        'context_tokens_total{model="m",kind="new"}': "0+1000x60",
        'context_tokens_total{model="m",kind="reused"}': f"0+{1000 - recomputed}x60",
        'context_tokens_total{model="m",kind="recomputed"}': f"0+{recomputed}x60",
        'holds_ended_total{model="m",how="used"}': f"0+{10 - broken}x60",
        'holds_ended_total{model="m",how="broken_waiting"}': f"0+{broken}x60",
        'pauses_total{model="m",decision="hold",reason="pays"}': "0+10x60",
    }


def admitted(starved: int) -> Series:
    return {
        'starved_turns_total{model="m"}': f"0+{starved}x60",
        'queue_seconds_count{model="m",turn="first"}': "0+100x60",
    }


def forecasts(errors: str) -> Series:
    return {
        'forecasts_compared_total{of="tokens"}': "0+10x400",
        'forecast_actual_total{of="tokens"}': "0+100x400",
        'forecast_absolute_error_total{of="tokens"}': errors,
    }


def answers(service: int, late: int, statistics: int = 0) -> Series:
    return {
        'forecasts_total{answered="service"}': f"0+{service}x60",
        'forecasts_total{answered="deadline"}': f"0+{late}x60",
        'forecasts_total{answered="statistics"}': f"0+{statistics}x60",
    }


def starts(*ended: bool) -> Series:
    """Replica processes that began at once; those that have ended did so after five minutes."""
    return {
        f'replica_starts_total{{model="m",WorkerId="{number}"}}': "1x5 stale" if over else "1x60"
        for number, over in enumerate(ended)
    }


def gauge(name: str, labels: str, high: float, low: float) -> tuple[Series, Series]:
    series = f"{name}{{{labels}}}"
    return {series: f"{high}x60"}, {series: f"{low}x60"}


STORIES = (
    Story("CaesuraTurnsMissTheirSloFast", "90m", turns(good=6), turns(good=46)),
    # 20 % outside is within what a month's budget bears for an hour, not for a day.
    Story("CaesuraTurnsMissTheirSlo", "8h", turns(good=48), turns(good=58), "5m"),
    # Nothing good at all, not even the counter's series.
    Story(
        "CaesuraTurnsMissTheirSloFast",
        "90m",
        {'requests_total{model="m",tenant="t",outcome="failed"}': "0+10x120"},
        {'requests_total{model="m",tenant="t",outcome="unfinished"}': "0+10x120"},
    ),
    # Two turns in an hour say nothing.
    Story("CaesuraTurnsMissTheirSloFast", "90m", turns(good=0), turns(good=0, of=0)),
    Story("CaesuraProgramsMissTheirSloFast", "90m", programs(good=6), programs(good=46)),
    Story("CaesuraProgramsMissTheirSlo", "8h", programs(good=48), programs(good=58), "5m"),
    Story("CaesuraNothingToScrape", "10m", {}, {'replica_up{model="m",state="up"}': "1x60"}),
    Story("CaesuraNoReplica", "10m", *gauge("replica_up", 'model="m",state="up"', 0, 1)),
    Story("CaesuraReplicaFlaps", "20m", starts(True, True, True, False), starts(True, True, False, False)),
    # All are gone.
    Story("CaesuraReplicaFlaps", "20m", starts(True, True, True), starts(True, True)),
    Story("CaesuraRouterKnowsOldThings", "10m", *gauge("snapshot_age_seconds", 'model="m"', 20, 3)),
    Story("CaesuraRefusals", "20m", refusals(20), refusals(2)),
    Story("CaesuraStoreDown", "10m", *gauge("store_up", 'by="ingress"', 0, 1)),
    Story("CaesuraToolFails", "30m", calls(ok=5), calls(ok=9)),
    Story("CaesuraKvThrash", "30m", memory(recomputed=600, broken=6), memory(recomputed=600, broken=0)),
    Story("CaesuraKvThrash", "30m", memory(recomputed=600, broken=6), memory(recomputed=100, broken=6)),
    Story("CaesuraStarvation", "30m", admitted(starved=5), admitted(starved=0)),
    Story("CaesuraTurnStuck", "10m", *gauge("oldest_waiting_seconds", 'model="m"', 300, 10)),
    Story("CaesuraStepsAreSlow", "30m", *gauge("step_pace", 'model="m"', 4, 1)),
    # A day at 0.4, then hours at 0.9; or 0.9 all along, which is a poor model, but no drift.
    Story("CaesuraForecastsDrift", "29h", forecasts("0+40x300 12040+90x100"), forecasts("0+90x400"), "5m"),
    Story("CaesuraForecastsFallBack", "30m", answers(service=5, late=5), answers(service=9, late=1)),
    Story("CaesuraForecastsFallBack", "30m", answers(service=0, late=5), answers(0, 0, statistics=9)),
)


def as_test_file(rules: str) -> dict[str, object]:
    """What `promtool test rules` reads; ``rules`` is the rule file's path."""
    tests = []
    for story in STORIES:
        for series, count in ((story.fires, [1.0]), (story.quiet, [])):
            firing = f'count by (alertname) (ALERTS{{alertstate="firing",alertname="{story.alert}"}})'
            samples = [{"labels": f'{{alertname="{story.alert}"}}', "value": value} for value in count]
            tests.append(
                {
                    "interval": story.interval,
                    "input_series": [{"series": PREFIX + name, "values": values} for name, values in series.items()],
                    "promql_expr_test": [{"expr": firing, "eval_time": story.at, "exp_samples": samples}],
                }
            )
    return {"rule_files": [rules], "evaluation_interval": "1m", "tests": tests}
