"""The autoscaling policy as timelines: with this load, so many replicas are wanted at these times.

A replica serves one second of work in each second, has 100,000 tokens of KV memory, and takes 20 s to start. The policy
uses 0.8 of work and memory, so that one replica suffices for 0.8 seconds of work, and two for 1.6.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.core.registry import AUTOSCALERS
from cluster.core.scaling_report import Demand, ReplicaLoadReport, ReplicaReport
from router.autoscaling.policy import AutoscalingPolicy, Reason, ScalingView

START_S = 20.0
KV_TOKENS = 100_000.0

Load = dict[str, float]
"""``work``: seconds of work that arrive in each second; ``tokens``: the working set of all replicas; further numbers of
`Demand`."""


def busy(work: float = 0.0, tokens: float = 1000.0, **demand: float) -> Load:
    """Turns that arrive, with ten in each replica."""
    return {"work": work, "tokens": tokens, "running": 10.0, "turns": 50.0, **demand}


IDLE: Load = {"work": 0.0, "tokens": 0.0, "running": 0.0, "turns": 0.0}


class Timeline:
    """Runs the policy once a second. Replicas that are wanted serve after `START_S`."""

    def __init__(self, least: int = 1, most: int = 8, ready: int = 1, policy: str = "caesura") -> None:
        self.policy: AutoscalingPolicy[Any] = AUTOSCALERS.load(policy)()
        self.state = self.policy.first()
        self.least, self.most = least, most
        self.ready = self.target = ready
        self.now_s = 1000.0
        self.began_s = self.now_s
        self.starting: list[float] = []
        self.changes: list[tuple[float, int, Reason]] = []

    def run(self, seconds: float, load: Load | Callable[[float, int], Load]) -> "Timeline":
        """Go on for so long. ``load`` may be a function of the time and of the number of replicas that serve."""
        for _ in range(round(seconds)):
            self.now_s += 1.0
            self.ready += sum(at_s <= self.now_s for at_s in self.starting)
            self.starting = [at_s for at_s in self.starting if at_s > self.now_s]
            self._decide(load(self.now_s - self.began_s, self.ready) if callable(load) else load)
        return self

    def _decide(self, load: Load) -> None:
        work, tokens, running = load["work"], load["tokens"], load["running"]
        demand = Demand(turn_work=work, **{k: v for k, v in load.items() if k not in ("work", "tokens", "running")})
        one = ReplicaLoadReport(KV_TOKENS, tokens / max(1, self.ready), 0.0, running, START_S)
        reports = [ReplicaReport(one) for _ in range(self.ready)]
        if reports:
            reports[0] = replace(reports[0], demands={"ingress": demand})
        view = ScalingView(self.now_s, self.ready, self.target, self.least, self.most, reports)
        decision = self.policy.decide(view, self.state)
        self.state = decision.state
        if decision.replicas > self.target:
            self.starting += [self.now_s + START_S] * (decision.replicas - self.target)
        elif decision.replicas < self.target:  # those that are starting end first
            self.ready = min(self.ready, decision.replicas)
            self.starting = self.starting[: decision.replicas - self.ready]
        if decision.replicas != self.target:
            self.changes.append((self.now_s - self.began_s, decision.replicas, decision.reason))
        self.target = decision.replicas

    @property
    def sizes(self) -> list[int]:
        """The numbers of replicas that were wanted, one after the other."""
        return [replicas for _, replicas, _ in self.changes]


def test_a_load_that_fits_changes_nothing() -> None:
    assert Timeline().run(600, busy(0.7)).changes == []


def test_a_step_of_the_load_is_followed_within_seconds_and_forgotten_after_two_start_up_times() -> None:
    """0.7 needs one replica, 2.8 needs four. Back at 0.5, one suffices even with the margin, after 40 s and more."""
    timeline = Timeline().run(60, busy(0.5)).run(120, busy(2.8))
    grown_s = timeline.changes[-1][0]
    assert (timeline.target, timeline.changes[0][2]) == (4, Reason.WORK)
    assert timeline.sizes == sorted(timeline.sizes), "it only grows"
    assert grown_s < 60 + 2 * START_S, "the smoothing takes half of a start"
    timeline.run(30, busy(0.5))
    assert timeline.target == 4, "a pause of half a minute costs no restart"
    timeline.run(60, busy(0.5))
    assert (timeline.target, timeline.changes[-1][2]) == (1, Reason.UNUSED)


def test_the_programs_that_arrive_announce_the_work_of_their_turns() -> None:
    """The turns of now need one replica. The programs of now will need three, but not before they are in full swing:
    with lives of 20 s that is when a replica has started, with lives of 2,000 s it is much later.
    """
    short = Timeline().run(5, busy(0.5, program_work=2.3, program_s=20.0))
    long = Timeline().run(5, busy(0.5, program_work=2.3, program_s=2000.0))
    assert (short.target, long.target) == (3, 1)


def test_work_that_waits_needs_replicas_while_it_is_more_than_they_do_in_a_start() -> None:
    """41 s of waiting work are 1 s that one replica has under way, and 2 s a second while another one starts."""
    assert Timeline().run(3, busy(0.1, queued_work_s=41.0)).target == 3
    assert Timeline().run(60, busy(0.1, queued_work_s=1.0)).changes == []


def test_the_working_set_needs_memory_whatever_the_work() -> None:
    timeline = Timeline().run(3, busy(0.1, tokens=250_000))
    assert timeline.changes == [(1.0, 4, Reason.MEMORY)]
    assert Timeline().run(3, busy(0.1, tokens=70_000, queued_tokens=20_000)).target == 2


def test_turns_that_miss_their_slo_get_another_replica_and_teach_the_capacity() -> None:
    """By the cost model 0.6 s of work a second fits one replica, but turns miss their SLO until there are two."""

    def load(at_s: float, ready: int) -> Load:
        return busy(0.6, missed=25.0 if ready < 2 else 0.0)

    timeline = Timeline().run(120, load)
    assert timeline.changes[0][1:] == (2, Reason.SLO)
    assert timeline.sizes == [2], "none is added while one starts, and two are kept"
    timeline.run(600, load)
    assert timeline.target == 2, "that one would suffice is known to be wrong"


def test_misses_that_no_replica_can_help_add_none() -> None:
    """A turn that misses its SLO alone on a replica would miss it on another."""
    alone = {**busy(0.1, missed=50.0), "running": 0.5}
    assert Timeline().run(300, alone).changes == []


def test_a_load_at_the_border_does_not_flap() -> None:
    """0.8 is the border between one replica and two. The load swings around it for an hour."""
    timeline = Timeline().run(3600, lambda at_s, ready: busy(0.85 if at_s % 60 < 30 else 0.7))
    assert timeline.sizes == [2]


def test_a_replica_stays_if_the_others_would_be_nearly_full_without_it() -> None:
    """0.75 fits one replica, but not with a fifth to spare: the next small rise would need the second one again."""
    timeline = Timeline().run(60, busy(1.0)).run(3600, busy(0.75))
    assert timeline.sizes == [2]
    assert timeline.run(120, busy(0.6)).sizes == [2, 1]


def bursts(every_s: float) -> Callable[[float, int], Load]:
    """For a minute there is work for four replicas, then for one; turns miss their SLO while there are fewer."""

    def load(at_s: float, ready: int) -> Load:
        return busy(2.8, missed=25.0 if ready < 4 else 0.0) if at_s % every_s < 60 else busy(0.4)

    return load


def test_bursts_that_come_again_are_awaited() -> None:
    """A start takes 20 s, so that replicas are given up after 40 s, and the second burst misses its SLO. From then on
    they are kept between bursts.
    """
    timeline = Timeline().run(600, bursts(300)).run(1, busy(0.4))
    learnt = len(timeline.changes)
    assert timeline.sizes.count(1) == 1 and timeline.changes[-1][0] < 360, "given up once, and wanted again"
    timeline.run(3000, bursts(300))
    assert len(timeline.changes) == learnt and timeline.target == 4
    timeline.run(600, busy(0.4))
    assert (timeline.target, timeline.changes[-1][2]) == (1, Reason.UNUSED), "not for ever"


def test_bursts_that_are_far_apart_are_not_awaited() -> None:
    """Half an hour and more without need is too long to keep replicas."""
    timeline = Timeline().run(4 * 2400, bursts(2400))
    assert [at_s // 2400 for at_s, replicas, _ in timeline.changes if replicas == 1] == [0, 1, 2, 3]
    assert all(at_s % 2400 < 200 for at_s, replicas, _ in timeline.changes if replicas == 1), (
        "as if each were the first"
    )


def test_what_was_learnt_of_bursts_is_forgotten() -> None:
    """Bursts five minutes apart make the policy keep replicas for six minutes. Half a day later a burst costs no more
    than the first one.
    """
    timeline = Timeline().run(1260, bursts(300)).run(12 * 3600, busy(0.4))
    timeline.run(60, lambda at_s, ready: busy(2.8, missed=25.0 if ready < 4 else 0.0)).run(30, busy(0.4))
    assert timeline.target == 4
    timeline.run(60, busy(0.4))
    assert timeline.target == 1


def test_replicas_that_start_in_time_are_given_up_as_before() -> None:
    """The load comes again after five minutes, but no turn misses its SLO meanwhile."""
    timeline = Timeline().run(1500, lambda at_s, ready: busy(2.8 if at_s % 300 < 60 else 0.4))
    assert timeline.sizes.count(1) == 5


def test_the_start_is_measured() -> None:
    """The replicas report 20 s. They take 20 s here too, from the decision on; a slower cluster waits for longer."""
    timeline = Timeline().run(60, busy(2.0))
    assert timeline.state.start_s == pytest.approx(START_S, abs=1.0)
    slow = Timeline().run(5, busy(2.0))
    slow.starting = [slow.now_s + 100.0] * len(slow.starting)
    slow.run(150, busy(2.0))
    assert slow.state.start_s is not None and slow.state.start_s > 100
    slow.run(150, busy(0.5))
    assert slow.target == 3, "fewer have to suffice for twice the measured start"


def test_the_start_is_measured_where_replicas_are_asked_for_while_others_start() -> None:
    """The working set grows every 7 s, so that a replica is asked for up to twice while another one starts."""
    timeline = Timeline()
    measured = set()
    for tokens in (10_000, 100_000, 190_000, 260_000, 260_000, 260_000, 260_000, 420_000, 420_000, 420_000, 420_000):
        for _ in range(7):
            timeline.run(1, busy(0.1, tokens=tokens))
            measured.add(timeline.state.start_s)
    assert timeline.sizes == [2, 3, 4, 6] and timeline.ready == 6
    assert measured == {None, START_S}


def test_replicas_that_are_no_longer_wanted_leave_no_measurement() -> None:
    """The maximum falls to one while two replicas start, and rises again: the start is measured from then on."""
    timeline = Timeline(most=3).run(5, busy(0.1, tokens=200_000))
    timeline.starting, timeline.target = [], 1
    timeline.most = 1
    timeline.run(100, busy(0.1, tokens=200_000))
    timeline.most = 3
    timeline.run(40, busy(0.1, tokens=200_000))
    assert timeline.ready == 3 and timeline.state.start_s == START_S


def test_bounds() -> None:
    assert Timeline(most=3).run(60, busy(100.0)).sizes == [3]
    assert Timeline(least=2, ready=2).run(3600, busy(0.1)).changes == []


def test_the_last_replica_goes_when_nobody_is_expected_and_not_before() -> None:
    """Idle for ten start-up times. A program in a pause of its tools counts, since its KV is in the working set."""
    timeline = Timeline(least=0).run(60, busy(0.5)).run(190, IDLE)
    assert timeline.target == 1
    timeline.run(30, IDLE)
    assert timeline.changes[-1][1:] == (0, Reason.IDLE)
    paused = {**IDLE, "tokens": 500.0}
    assert Timeline(least=0).run(3600, paused).changes == []
    assert Timeline(least=1).run(3600, IDLE).changes == []


def test_a_replica_that_was_started_from_zero_is_idle_from_its_start_on() -> None:
    """The client that had it started may have gone, and the next one comes within minutes."""
    timeline = Timeline(least=0).run(60, busy(0.5)).run(300, IDLE)
    assert timeline.sizes == [0]
    timeline.run(3600, IDLE)
    timeline.target, timeline.starting = 1, [timeline.now_s + START_S]
    timeline.run(START_S + 190, IDLE)
    assert timeline.target == 1
    timeline.run(30, IDLE)
    assert timeline.sizes == [0, 0]


def test_replicas_that_cannot_start_keep_no_others() -> None:
    """The cluster has room for three of four. When the load has fallen, the three are given up nevertheless."""
    timeline = Timeline(most=4).run(60, busy(0.5)).run(18, busy(2.8))
    timeline.starting = timeline.starting[:2]
    timeline.run(600, busy(2.8))
    assert (timeline.target, timeline.ready) == (4, 3), "it is needed"
    timeline.run(35, busy(0.5))
    assert timeline.target == 4
    timeline.run(60, busy(0.5))
    assert (timeline.target, timeline.ready, timeline.changes[-1][2]) == (1, 1, Reason.UNUSED)


def test_without_reports_the_number_stays() -> None:
    """All replicas are gone or have just started: nothing is known."""
    timeline = Timeline(least=0, ready=0)
    timeline.target = 1
    assert timeline.run(60, IDLE).changes == []
