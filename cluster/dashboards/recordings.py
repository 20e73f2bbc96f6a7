"""What Prometheus records: goodput and the shares of bad turns and programs over the windows that alerts look at."""

from cluster import metrics as m
from cluster.dashboards.promql import mean, per, quantile, rate, total
from cluster.dashboards.rule import Group, Recording
from cluster.goodput import Outcome, Verdict

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
"""Of the multi-window burn rates of Google's SRE workbook, chapter 5."""

SHORT = "5m"
MODEL = ("model",)
TENANTS = ("model", "tenant")
FORECASTS_OVER = "1h"
GOOD = f'verdict="{Verdict.GOOD.value}"'

CLIENT_STAYED = f'outcome!="{Outcome.UNFINISHED.value}"'
"""A client that went away took its turn with it; nobody failed it."""
DECIDED = f'verdict!="{Verdict.ABANDONED.value}"'
"""The same of its program."""


def turn_errors(window: str) -> str:
    """By model, the share of turns of ``window`` that were not good."""
    return f"caesura:turns_not_good:ratio_rate{window}"


def program_errors(window: str) -> str:
    """By model, the share of programs that ended in ``window`` and were not good."""
    return f"caesura:programs_not_good:ratio_rate{window}"


def turns(window: str) -> str:
    """By model, turns a second."""
    return f"caesura:turns:rate{window}"


def programs(window: str) -> str:
    """By model, programs that ended, a second."""
    return f"caesura:programs_ended:rate{window}"


FORECAST_ERROR = f"caesura:forecast_error:ratio_rate{FORECASTS_OVER}"
"""By what is forecast, the sum of errors over the sum of what came."""
FORECASTS_COMPARED = f"caesura:forecasts_compared:rate{FORECASTS_OVER}"
RECOMPUTED = f"caesura:recomputed_context:ratio_rate{SHORT}"
"""By model, of the prompt tokens that a replica had known before, the share that it computed again."""
HELD = "caesura:held_blocks:ratio"
"""By model, the share of KV blocks that is held."""


def _window(window: str) -> tuple[Recording, ...]:
    ended = rate(m.REQUESTS, CLIENT_STAYED, by=MODEL, over=window)
    decided = rate(m.PROGRAM_ENDS, DECIDED, by=MODEL, over=window)
    good_turns = rate(m.GOOD_REQUESTS, by=MODEL, over=window)
    good_programs = rate(m.PROGRAM_ENDS, GOOD, by=MODEL, over=window)
    return (
        Recording(turns(window), ended),
        Recording(turn_errors(window), f"1 - ({good_turns} or 0 * {turns(window)}) / ({turns(window)} > 0)"),
        Recording(programs(window), decided),
        Recording(
            program_errors(window), f"1 - ({good_programs} or 0 * {programs(window)}) / ({programs(window)} > 0)"
        ),
    )


def _kinds(*kinds: str) -> str:
    return rate(m.CONTEXT_TOKENS, f'kind=~"{"|".join(kinds)}"', by=MODEL, over=SHORT)


GOODPUT = Group(
    "caesura-goodput",
    (
        Recording(f"caesura:good_turns:rate{SHORT}", rate(m.GOOD_REQUESTS, by=TENANTS, over=SHORT)),
        Recording(f"caesura:good_programs:rate{SHORT}", rate(m.PROGRAM_ENDS, GOOD, by=TENANTS, over=SHORT)),
        Recording(f"caesura:offered_programs:rate{SHORT}", rate(m.PROGRAMS, by=TENANTS, over=SHORT)),
        *(recording for window in WINDOWS for recording in _window(window)),
    ),
)

LATENCY = Group(
    "caesura-latency",
    (
        Recording(f"caesura:ttft_seconds:p95_rate{SHORT}", quantile(0.95, m.TTFT, by=MODEL, over=SHORT)),
        Recording(f"caesura:tpot_seconds:p95_rate{SHORT}", quantile(0.95, m.TPOT, by=MODEL, over=SHORT)),
        Recording(f"caesura:normalized_latency_seconds:mean_rate{SHORT}", mean(m.NORMALIZED, by=MODEL, over=SHORT)),
        Recording(f"caesura:program_seconds:p95_rate{SHORT}", quantile(0.95, m.PROGRAM_S, by=MODEL, over=SHORT)),
        Recording(
            f"caesura:bubble_seconds:p95_rate{SHORT}",
            quantile(0.95, m.QUEUE_S, 'turn="resumed"', by=MODEL, over=SHORT),
        ),
    ),
)

MEMORY = Group(
    "caesura-memory",
    (
        Recording(HELD, per(total(m.HELD_BLOCKS, by=MODEL), total(m.TOTAL_BLOCKS, by=MODEL))),
        Recording(
            RECOMPUTED,
            per(_kinds("recomputed"), f"({_kinds('recomputed', 'reused', 'fetched')} > 0)"),
        ),
    ),
)

FORECASTS = Group(
    "caesura-forecasts",
    (
        Recording(FORECASTS_COMPARED, rate(m.FORECASTS_COMPARED, by=("of",), over=FORECASTS_OVER)),
        Recording(
            FORECAST_ERROR,
            per(
                rate(m.FORECAST_ERROR, by=("of",), over=FORECASTS_OVER),
                f"({rate(m.FORECAST_ACTUAL, by=('of',), over=FORECASTS_OVER)} > 0)",
            ),
        ),
    ),
)

GROUPS: tuple[Group, ...] = (GOODPUT, LATENCY, MEMORY, FORECASTS)
