"""`caesura top` and `caesura status` as a terminal shows them."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from cluster.offline.bench.history import MemoryUse
from cluster.offline.live_view.frame import REFUSALS_SHOWN, State, frame, is_well, memory_bar, parts_of, table
from cluster.offline.live_view.look import Look
from cluster.offline.live_view.now import now_of
from tests.live_view.scripted_looks import look, replica, without

URL = "http://127.0.0.1:8000"
CHAT = "/v1/chat/completions"
PAUSES_LATER = {"hold": {"pays": 16, "free": 2}, "swap": {"pays": 1}, "release": {"does not pay": 4}}


def shown(what: RenderableType, width: int = 140) -> str:
    console = Console(width=width, record=True, file=StringIO(), highlight=False)
    console.print(what)
    return console.export_text()


def test_a_frame_shows_what_happened_between_two_looks() -> None:
    looks = [
        look(0.0, good=10.0),
        look(4.0, replica(kv_retention_decisions=PAUSES_LATER), replica("replica-b"), good=18.0),
    ]
    text = shown(frame(URL, looks))
    assert "caesura 0.1.0  http://127.0.0.1:8000  ready  tiny  policy caesura" in text
    # 8 good of 16 that ended, 24 offered and 40 good requests of 48, in 4 s.
    assert "2 programs/s (50% of those that ended; 6 offered)" in text
    assert "10 of 12 requests/s   over 4 s" in text
    # 6 holds and a swap in 4 s; of the second replica there is no look before.
    assert "decisions  1.75/s at pauses, 4/s placements   waiting at the front 5, moves 1, refused 3" in text
    first, second = (line.split() for line in text.splitlines() if line.startswith("replica-"))
    assert first[2:] == ["3", "1", "9", "1.5", "0.25", "0", "25%", "-", "1.25"]
    assert second[2:] == ["3", "1", "9", "-", "-", "-", "25%", "-", "1.25"]
    assert first[1] == "█" * 14 + "▓" * 6 + "▒" * 9 + "░" * 3
    assert "prog-1" in text and "in_progress" in text


def refused(at_s: float, *counts: tuple[str, str, str, str, float]) -> Look:
    """Each: worker, route, status, code, count."""
    samples = {}
    for worker, route, status, code, count in counts:
        labels = (("WorkerId", worker), ("code", code), ("route", route), ("status", status))
        samples["caesura_http_refusals_total", labels] = count
    seen = look(at_s)
    return Look(at_s, seen.answers, {}, samples)


def test_refused_requests_are_shown_by_route_and_code_the_most_recent_first() -> None:
    old, new = ("a", "/v1/messages", "404", "not_found_error"), ("a", CHAT, "400", "context_length_exceeded")
    first = refused(0.0, (*old, 9.0), (*new, 1.0), ("gone", CHAT, "400", "context_length_exceeded", 5.0))
    last = refused(10.0, (*old, 9.0), (*new, 3.0), ("b", CHAT, "400", "context_length_exceeded", 4.0))
    rows = [line.split() for line in shown(frame(URL, [first, last])).splitlines() if line.startswith("/v1/")]
    assert rows == [
        [CHAT, "400", "context_length_exceeded", "6", "7"],
        ["/v1/messages", "404", "not_found_error", "0", "9"],
    ]
    many = [("a", f"/{number}", "400", "x", 1.0) for number in range(20)]
    lines = shown(frame(URL, [refused(0.0), refused(1.0, *many)])).splitlines()
    assert sum(line.startswith("/") for line in lines) == REFUSALS_SHOWN


def test_without_refusals_there_is_no_table_of_them() -> None:
    assert "refused requests" not in shown(frame(URL, [look(0.0), look(1.0)]))
    none = refused(1.0, ("a", CHAT, "400", "x", 0.0))
    assert "refused requests" not in shown(frame(URL, [none]))


def test_early_prefill_is_shown_by_what_became_of_it() -> None:
    earlier = replica(early_prefill_tokens={"used": 100, "wasted": 10}, early_prefill_pending=0)
    later = replica(early_prefill_tokens={"used": 900, "wasted": 30}, early_prefill_pending=70)
    restarted = replica("replica-b", early_prefill_tokens={"used": 5, "wasted": 0}, early_prefill_pending=1)
    before = replica("replica-b", early_prefill_tokens={"used": 50, "wasted": 9})
    text = shown(frame(URL, [look(0.0, earlier, before), look(4.0, later, restarted)]))
    assert "prefill    in pauses: 200 tokens/s used, 5 wasted, 71 tokens pending" in text
    assert "prefill    in pauses: - tokens/s used, - wasted, 70 tokens pending" in shown(frame(URL, [look(4.0, later)]))


def test_the_disk_tier_is_shown_by_its_used_share_or_by_what_is_wrong_with_it() -> None:
    tier = {"disk_tokens": 400, "disk_used_tokens": 100}
    degraded = {"full": 1, "gone": 0}
    text = shown(frame(URL, [look(0.0, replica(**tier), replica("replica-b", **tier, disk_degraded=degraded))]))
    first, second = (line.split() for line in text.splitlines() if line.startswith("replica-"))
    assert (first[-2], second[-2]) == ("25%", "full")


def test_a_frame_fits_a_narrow_terminal() -> None:
    text = shown(frame(URL, [look(0.0), look(1.0)]), width=80)
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_unknown_is_shown_as_unknown() -> None:
    closed = without(look(good=None), statistics="HTTP 404", router="HTTP 404", ready="no model answers")
    text = shown(frame(URL, [closed]))
    assert "not ready" in text
    assert "replicas are unknown: HTTP 404" in text
    assert "goodput    unknown: /metrics has none of Caesura's counters" in text
    assert "-/s placements   waiting at the front -, moves -, refused -" in text


def test_a_look_without_metrics_is_no_look_at_counters_of_zero() -> None:
    failed = replace(look(0.0), errors={"metrics": "HTTP 503"})
    now = now_of([failed, look(4.0, good=1000.0), look(8.0, good=1002.0)])
    assert (now.goodput.window_s, now.goodput.programs, now.placements_per_s) == (4.0, 0.5, 4.0)
    assert now_of([failed, look(4.0, good=1000.0)]).goodput.programs is None
    assert now_of([look(0.0, good=1000.0), replace(failed, at_s=4.0)]).placements_per_s is None


def test_a_replica_that_was_started_again_does_not_undo_decisions() -> None:
    (now,) = now_of([look(0.0), look(4.0, replica(kv_retention_decisions={"hold": {"pays": 1}}))]).replicas
    assert set(now.decisions_per_s.values()) == {0.0}


def test_junk_among_numbers_is_nothing() -> None:
    odd = replica(kv_retention_decisions=3, running="x", step_time_ratio=None, cached_blocks=None, total_blocks="?")
    text = shown(frame(URL, [look(0.0, odd), look(1.0, odd, router={"models": {"tiny": {"placements": 1}}})]))
    assert "replica-a" in text


@pytest.mark.parametrize(
    ("use", "bar"),
    [
        (MemoryUse(5, 3, 1, 1), "█████▓▓▓▒░"),
        (MemoryUse(10, 0, 0, 0), "██████████"),
        (MemoryUse(0, 0, 0, 10), "░░░░░░░░░░"),
        # What there is at all can be seen, at the cost of the largest part.
        (MemoryUse(1, 1, 1, 997), "█▓▒░░░░░░░"),
        (MemoryUse(0, 0, 0, 0), "-"),
    ],
)
def test_memory_is_a_bar(use: MemoryUse, bar: str) -> None:
    assert memory_bar(use, cells=10).plain == bar


def test_all_is_well() -> None:
    parts = parts_of(look())
    assert is_well(parts)
    assert {part.name: part.state for part in parts} == dict.fromkeys(
        ("ingress", "replicas", "policy", "store", "predictor", "versions"), State.OK
    )
    text = shown(table(parts))
    assert "serves tiny" in text and "1 answer" in text and "statistics, local 7" in text and "ray 2.60.0" in text


@pytest.mark.parametrize(
    ("seen", "name", "detail"),
    [
        (without(look(), ready="no model answers: gone"), "ingress", "no model answers: gone"),
        (without(look(), statistics="1 of 2 replicas failed"), "replicas", "1 of 2 replicas failed"),
        (look(0.0, replica(draining=True)), "replicas", "1 answer, 1 of them draining"),
        (look(0.0, replica(), replica("b", policy="vllm")), "policy", "caesura and vllm"),
        (
            look(router={"models": {"m": {"store": {"healthy": False, "failures": {"timeout": 4}}}}}),
            "store",
            "down, 4 failed exchanges since the start",
        ),
    ],
)
def test_trouble_is_named(seen: object, name: str, detail: str) -> None:
    parts = parts_of(seen)  # type: ignore[arg-type]
    assert not is_well(parts)
    assert [(part.name, part.detail) for part in parts if part.state is State.TROUBLE] == [(name, detail)]


def test_a_closed_administration_is_no_trouble() -> None:
    closed = without(look(), statistics="HTTP 404", router="HTTP 404", predictor="HTTP 404")
    parts = parts_of(closed)
    assert is_well(parts)
    assert [part.name for part in parts if part.state is State.UNKNOWN] == ["replicas", "policy", "store", "predictor"]
