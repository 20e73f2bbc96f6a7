"""A moment as of which a Prometheus can be asked everything.

A scrape that fails, on a busy machine by taking longer than its interval, makes every series of its target stale until
the next one: for that long all gauges, and the rules that are made of them, have nothing to show.
"""

import time

from cluster import metrics as m
from cluster.clock import Clock
from cluster.proof.prometheus import Prometheus, PrometheusFailed

POLL_S = 0.2


def gapless_moment(prometheus: Prometheus, clock: Clock, *, over_s: float, within_s: float) -> float:
    """The time of the newest scrapes, as Unix seconds, once those of the last ``over_s`` seconds all went well.

    Of every target, and of all nodes of a target that tells of nodes which it left out.

    Raises:
        PrometheusFailed: that was not so within ``within_s`` seconds.
    """
    window = f"[{1000 * over_s:.0f}ms]"
    scraped = f"timestamp(up) and min_over_time(up{window}) == 1 and count_over_time(up{window}) > 1"
    left_out = f"sum(max_over_time({m.SCRAPE_FAILURES.exported}{window})) > 0"
    deadline_s = clock.now_s() + within_s
    while True:
        times_s = [one.value for one in prometheus.query(f"({scraped}) unless on() ({left_out})")]
        if times_s and len(times_s) == len(prometheus.query("up")):
            return min(times_s)
        if clock.now_s() > deadline_s:
            raise PrometheusFailed(f"no {over_s:g} s without a failed scrape were seen within {within_s:g} s")
        time.sleep(POLL_S)
