"""Processes that came and went, told by the series that they left behind.

A counter of starts would not tell: a process that starts anew has a series of its own, which begins at 1, and a rate
sees no growth in it.
"""

from cluster import metrics as m
from cluster.dashboards.promql import select

WINDOW = "30m"


def ended_replicas() -> str:
    """By model, how many replica processes were there within the window and are gone."""
    seen = f"count by (model) (last_over_time({select(m.REPLICA_STARTS, over=WINDOW)}))"
    return f"{seen}\n- (count by (model) ({select(m.REPLICA_STARTS)}) or 0 * {seen})"
