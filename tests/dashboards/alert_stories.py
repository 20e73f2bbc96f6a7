"""For each alert, what Prometheus sees when it has to fire and when it must not, as `promtool test rules` takes it."""

from dataclasses import dataclass

from cluster.observing.catalogue import PREFIX

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
    """Of the series and of evaluations."""


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


def rejections(rejected: int) -> Series:
    return {
        'requests_rejected_total{model="m",reason="queue_timeout"}': f"0+{rejected}x60",
        'routing_decisions_total{model="m",reason="new"}': f"0+{100 - rejected}x60",
    }


def unnamed(rejected: int) -> Series:
    """Requests that are rejected before their model is read."""
    return {
        'requests_total{model="",tenant="",outcome="rejected"}': f"0+{rejected}x400",
        'requests_rejected_total{model="",reason="tenant_rate"}': f"0+{rejected}x400",
    }


def store_memory(used: int, of: int = 100, release: str = "a") -> Series:
    labels = f'{{namespace="{release}"}}'
    return {f"store_used_bytes{labels}": f"{used}x60", f"store_max_bytes{labels}": f"{of}x60"}


def calls(ok: int) -> Series:
    return {
        'tool_calls_total{tool="book",outcome="ok"}': f"0+{ok}x60",
        'tool_calls_total{tool="book",outcome="failed"}': f"0+{10 - ok}x60",
    }


def memory(recomputed: int, evicted: int) -> Series:
    return {
        'context_tokens_total{model="m",source="new"}': "0+1000x60",
        'context_tokens_total{model="m",source="reused"}': f"0+{1000 - recomputed}x60",
        'context_tokens_total{model="m",source="recomputed"}': f"0+{recomputed}x60",
        'kv_pins_released_total{model="m",reason="used"}': f"0+{10 - evicted}x60",
        'kv_pins_released_total{model="m",reason="broken_waiting"}': f"0+{evicted}x60",
        'kv_retention_decisions_total{model="m",decision="hold",reason="pays"}': "0+10x60",
    }


def admitted(starved: int) -> Series:
    return {
        'starved_turns_total{model="m"}': f"0+{starved}x60",
        'queue_seconds_count{model="m",turn="first"}': "0+100x60",
    }


def predictions(errors: str) -> Series:
    return {
        'predictions_compared_total{quantity="tokens"}': "0+10x400",
        'prediction_actual_total{quantity="tokens"}': "0+100x400",
        'prediction_absolute_error_total{quantity="tokens"}': errors,
    }


def sources(service: int, late: int, statistics: int = 0) -> Series:
    return {
        'predictions_total{source="service"}': f"0+{service}x60",
        'predictions_total{source="deadline"}': f"0+{late}x60",
        'predictions_total{source="statistics"}': f"0+{statistics}x60",
    }


def replicas(up: str, least: int = 1, unplaced: int = 0) -> Series:
    """One replica with these values of its state, of a model with so many replicas at least."""
    return {
        'replicas_min{model="m"}': f"{least}x60",
        'replica_up{model="m",state="up"}': up,
        'requests_rejected_total{model="m",reason="no_replica"}': f"0+{unplaced}x60",
    }


def starts(*ended: bool) -> Series:
    """Replica processes that began at once; those that have ended did so after five minutes."""
    return {
        f'replica_up{{model="m",state="up",process="{number}"}}': "1x5 stale" if over else "1x60"
        for number, over in enumerate(ended)
    }


def moved(processes: int) -> Series:
    """Replica processes that live, whose metrics come from another pod after five minutes."""
    series = 'replica_up{{model="m",state="up",process="p{}",pod="{}"}}'
    before = {series.format(number, "old"): "1x5 stale" for number in range(processes)}
    return before | {series.format(number, "new"): "_x5 1x60" for number in range(processes)}


def removals(number: int) -> Series:
    """The autoscaler removed so many replicas after four minutes."""
    return {'replicas_removed_total{model="m"}': f"0x4 {number}x60"}


def gauge(name: str, labels: str, high: float, low: float) -> tuple[Series, Series]:
    series = f"{name}{{{labels}}}"
    return {series: f"{high}x60"}, {series: f"{low}x60"}


STORIES = (
    Story("CaesuraTurnSloBurnFast", "90m", turns(good=6), turns(good=46)),
    # 20 % outside is within what a month's budget bears for an hour, not for a day.
    Story("CaesuraTurnSloBurnSlow", "8h", turns(good=48), turns(good=58), "5m"),
    # Nothing good at all, not even the counter's series.
    Story(
        "CaesuraTurnSloBurnFast",
        "90m",
        {'requests_total{model="m",tenant="t",outcome="failed"}': "0+10x120"},
        {'requests_total{model="m",tenant="t",outcome="unfinished"}': "0+10x120"},
    ),
    # The share of two turns in an hour is not significant.
    Story("CaesuraTurnSloBurnFast", "90m", turns(good=0), turns(good=0, of=0)),
    # They count as turns of the models that are served, and one in a thousand is none of a model's failures.
    Story(
        "CaesuraTurnSloBurnFast",
        "90m",
        turns(good=1000, of=1000) | unnamed(3000),
        turns(good=1000, of=1000) | unnamed(1),
    ),
    Story("CaesuraProgramSloBurnFast", "90m", programs(good=6), programs(good=46)),
    Story("CaesuraProgramSloBurnSlow", "8h", programs(good=48), programs(good=58), "5m"),
    Story("CaesuraMetricsAbsent", "10m", {}, replicas("1x60")),
    # The replicas are gone; or there are none, since no program needs one.
    Story("CaesuraMetricsAbsent", "30m", replicas("1x10 stale"), replicas("1x10 stale", least=0)),
    # The ingresses are gone.
    Story("CaesuraMetricsAbsent", "10m", {'replica_up{model="m",state="up"}': "1x60"}, replicas("1x60")),
    # The replica drains, or its process has ended.
    Story("CaesuraNoReplicaUp", "30m", replicas("0x60"), replicas("1x60")),
    Story("CaesuraNoReplicaUp", "30m", replicas("1x20 stale"), replicas("1x60")),
    # It has not started within 15 minutes, or has still time.
    Story("CaesuraNoReplicaUp", "20m", {'replicas_min{model="m"}': "1x60"}, {'replicas_min{model="m"}': "_x9 1x60"}),
    # A model that needs no replica: it could not start when a turn came, or none came.
    Story("CaesuraNoReplicaUp", "40m", replicas("1x20 stale", 0, unplaced=3), replicas("1x20 stale", 0)),
    Story("CaesuraReplicaCrashLoop", "20m", starts(True, True, True, False), starts(True, True, False, False)),
    # The head's pod, which has the metrics of all, was replaced.
    Story("CaesuraReplicaCrashLoop", "20m", moved(3) | starts(True, True, True), moved(4)),
    # All are gone.
    Story("CaesuraReplicaCrashLoop", "20m", starts(True, True, True), starts(True, True)),
    # The autoscaler removed some of those that ended.
    Story(
        "CaesuraReplicaCrashLoop",
        "20m",
        starts(True, True, True, True, True, True) | removals(3),
        starts(True, True, True, True, True) | removals(3),
    ),
    Story("CaesuraRouterSnapshotStale", "10m", *gauge("snapshot_age_seconds", 'model="m"', 20, 3)),
    Story("CaesuraRejectionRateHigh", "20m", rejections(20), rejections(2)),
    Story("CaesuraRejectionRateHigh", "20m", rejections(2) | unnamed(20), rejections(2) | unnamed(1)),
    # Nothing is routed.
    Story("CaesuraRejectionRateHigh", "20m", unnamed(20), unnamed(0)),
    Story("CaesuraStoreDown", "10m", *gauge("store_up", 'component="router"', 0, 1)),
    Story("CaesuraStoreNearlyFull", "20m", store_memory(80), store_memory(60)),
    # Another release has a large one.
    Story(
        "CaesuraStoreNearlyFull",
        "20m",
        store_memory(80) | store_memory(100, of=1000, release="b"),
        store_memory(60) | store_memory(600, of=1000, release="b"),
    ),
    # Without a limit, it cannot be full.
    Story("CaesuraStoreNearlyFull", "20m", store_memory(80), store_memory(80, of=0)),
    Story("CaesuraToolFailing", "30m", calls(ok=5), calls(ok=9)),
    Story("CaesuraKvThrashing", "30m", memory(recomputed=600, evicted=6), memory(recomputed=600, evicted=0)),
    Story("CaesuraKvThrashing", "30m", memory(recomputed=600, evicted=6), memory(recomputed=100, evicted=6)),
    Story("CaesuraStarvation", "30m", admitted(starved=5), admitted(starved=0)),
    Story("CaesuraTurnStuck", "10m", *gauge("oldest_waiting_seconds", 'model="m"', 300, 10)),
    Story("CaesuraStepTimeHigh", "30m", *gauge("step_time_ratio", 'model="m"', 4, 1)),
    # A day at 0.4, then hours at 0.9; or 0.9 all along, which is a poor model, but not drift.
    Story("CaesuraPredictionDrift", "29h", predictions("0+40x300 12040+90x100"), predictions("0+90x400"), "5m"),
    Story("CaesuraPredictorDegraded", "30m", sources(service=5, late=5), sources(service=9, late=1)),
    Story("CaesuraPredictorDegraded", "30m", sources(service=0, late=5), sources(0, 0, statistics=9)),
)


INTERVALS = sorted({story.interval for story in STORIES})


def as_test_file(rules: str, interval: str) -> dict[str, object]:
    """The stories of one interval as `promtool test rules` reads them; ``rules`` is the rule file's path."""
    tests = []
    for story in (one for one in STORIES if one.interval == interval):
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
    return {"rule_files": [rules], "evaluation_interval": interval, "tests": tests}
