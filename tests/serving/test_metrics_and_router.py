"""One real cluster of two ingresses and two replicas, for its metrics and for its router.

What `/metrics` has is what clients experienced. Each program lives in one place, whatever happens to the rest.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.local.embedded_redis import EmbeddedRedis
from tests.serving.served import REPORTED_OFTEN, served

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CONFIG = """
http: {{port: 0, ingress_replicas: 2, trust_request_start: true}}
replicas: {{count: 2, kv_cache_bytes: 33554432}}
engine: {{max_model_len: 2048, max_num_seqs: 32}}
slo: {{ttft_s: 60.0}}
redis: {{url: "{url}", refresh_s: 0.2, timeout_s: 2.0}}
# No moves for load: they are tested where time is virtual.
router: {{parameters: {{max_moves: 0}}}}
"""
SLO_S = 60.0
WITHIN_S = 60.0
BLOCK = 32
"""Tokens of a block of KV."""


class Site:
    """The cluster, as a client and as an operator see it."""

    def __init__(self, url: str, redis: EmbeddedRedis) -> None:
        self.redis = redis
        self.http = httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_connections=64))

    def turn(self, program: str, prompt: list[int], **more: Any) -> dict[str, Any]:
        """A turn's answer; it must be one."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **more}
        answer = self.http.post("/v1/completions", json=body, headers={"x-session-id": program})
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def live(self, program: str, turns: int, first: int, done: list[int] | None = None) -> None:
        """Turns of a program, each bringing all that was said before; all but the newest tokens must be cached."""
        prompt = [first % 200 + 10] * 100
        for number in range(turns):
            told = self.turn(program, prompt)
            cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
            if number:
                assert cached >= (len(prompt) - 20) // BLOCK * BLOCK - BLOCK, (program, number, told["usage"])
            prompt = prompt + told["choices"][0]["token_ids"] + [first % 200 + 11] * 12
            if done is not None:
                done.append(1)

    def turns_at_home(self, program: str) -> int:
        """How many of its turns the replica where it lives has seen."""
        answer = self.http.get(f"/v1/programs/{program}")
        assert answer.status_code == 200, answer.text
        return len(answer.json()["turns"])

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Each replica's."""
        answer = self.http.get("/admin/statistics")
        assert answer.status_code == 200, answer.text
        return {replica["replica"]: replica for replica in answer.json()["replicas"]}

    def known(self) -> int:
        """Programs that replicas know, those known by two counted twice."""
        return sum(replica["programs"] for replica in self.statistics().values())

    def split(self, turns: dict[str, int]) -> dict[str, Any]:
        """The programs of which a replica has not seen that many turns, and what the routers did; for a failure."""
        seen = {program: self.turns_at_home(program) for program in turns}
        wrong = {program: (seen[program], expected) for program, expected in turns.items() if seen[program] != expected}
        return {"seen and expected": wrong, "routers": self.routers(), "replicas": self.statistics()}

    def routers(self) -> list[dict[str, Any]]:
        """What both ingresses tell of theirs."""
        seen: dict[str, dict[str, Any]] = {}

        def look() -> bool:
            told = self.http.get("/admin/router").json()
            seen[told["ingress"]] = told["models"]["tiny"]
            return len(seen) == 2

        until(lambda: any(self._together(look)), "two ingresses")
        return list(seen.values())

    @staticmethod
    def _together(work: Callable[[], bool]) -> list[bool]:
        with ThreadPoolExecutor(8) as pool:
            return [one.result() for one in [pool.submit(work) for _ in range(8)]]


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WITHIN_S
    while not (told := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return told


def counted(routers: list[dict[str, Any]], group: str, *reasons: str) -> int:
    return sum(router[group].get(reason, 0) for router in routers for reason in reasons)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """In a process of its own: a process can have one Ray."""
    file = tmp_path_factory.mktemp("router") / "caesura.yaml"
    with EmbeddedRedis() as redis:
        file.write_text(CONFIG.format(url=redis.url))
        with served(file, **REPORTED_OFTEN) as url:
            yield Site(url, redis)


@pytest.fixture(scope="module")
def http(site: Site) -> httpx.Client:
    return site.http


# --- metrics: before all others, since they count from the start of the cluster ---------------------------------

Values = dict[tuple[str, ...], float]


def read(http: httpx.Client, name: str, *labels: str) -> Values:
    """A metric's values by those labels, summed over the others."""
    answer = http.get("/metrics").raise_for_status()
    found: Values = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name == name:
                key = tuple(sample.labels[label] for label in labels)
                found[key] = found.get(key, 0.0) + sample.value
    return found


def seen(condition: Callable[[], bool]) -> None:
    """Look again and again; what does not come fails in the assertion after it."""
    deadline_s = time.monotonic() + WITHIN_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.5)


def judged(http: httpx.Client, program: str, *, last: bool = False, waited_s: float = 0.0, **more: Any) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7, 8] * 20, "max_tokens": 4, "vllm_xargs": {"is_last_step": int(last)}}
    headers = {"x-session-id": program, "x-request-start": f"t={time.time() - waited_s}"}
    with http.stream("POST", "/v1/completions", json=body | more, headers=headers) as response:
        response.raise_for_status()
        for _ in response.iter_raw():
            pass


def test_programs_are_judged_over_both_ingresses(http: httpx.Client) -> None:
    before = read(http, "caesura_programs_total").get((), 0.0)
    for number in range(6):
        late = number == 5
        judged(http, f"p{number}", waited_s=2 * SLO_S if late else 0.0, stream=True)
        judged(http, f"p{number}")
        judged(http, f"p{number}", last=True, stream=True)
    expected = {
        "good programs": 5,
        "late programs": 1,
        "programs": before + 6,
        "turns that ended well": 18,
        "good turns": 17,
        "turns that missed": 1,
        "times to first token": 18,
        "programs with a number of turns": 6,
    }

    def counted() -> dict[str, float]:
        verdicts = read(http, "caesura_program_ends_total", "verdict")
        turns = read(http, "caesura_requests_total", "outcome", "model", "tenant")
        return {
            "good programs": verdicts.get(("good",), 0.0),
            "late programs": verdicts.get(("late",), 0.0),
            "programs": read(http, "caesura_programs_total").get((), 0.0),
            "turns that ended well": turns.get(("ok", "tiny", "default"), 0.0),
            "good turns": read(http, "caesura_good_requests_total").get((), 0.0),
            "turns that missed": read(http, "caesura_slo_misses_total", "bound").get(("ttft",), 0.0),
            "times to first token": read(http, "caesura_ttft_seconds_count").get((), 0.0),
            "programs with a number of turns": read(http, "caesura_program_turns_count").get((), 0.0),
        }

    seen(lambda: counted() == expected)  # each ingress reports by itself
    assert counted() == expected
    assert {verdict for (verdict,), n in read(http, "caesura_program_ends_total", "verdict").items() if n} == {
        "good",
        "late",
    }


def test_what_a_client_got_wrong_is_no_turn(http: httpx.Client) -> None:
    before = read(http, "caesura_requests_total")
    wrong = {"model": "tiny", "prompt": [5] * 4000, "max_tokens": 4}
    assert http.post("/v1/completions", json=wrong, headers={"x-session-id": "wrong"}).status_code == 400
    judged(http, "right", last=True)
    seen(lambda: read(http, "caesura_requests_total") != before)
    assert read(http, "caesura_requests_total")[()] == before[()] + 1


def test_the_replica_and_the_router_are_there_too(http: httpx.Client) -> None:
    expected = {
        "blocks": True,
        "replicas up": 4,  # each ingress sees both replicas
        "routers with the store": 2,
        "decisions": True,
        "generated tokens": True,
    }

    def there() -> dict[str, float]:
        return {
            "blocks": read(http, "caesura_total_blocks").get((), 0.0) > 0,
            "replicas up": read(http, "caesura_replicas", "state").get(("up",), 0.0),
            "routers with the store": read(http, "caesura_store_up", "component").get(("router",), 0.0),
            "decisions": sum(read(http, "caesura_routing_decisions_total").values()) >= 18,
            "generated tokens": read(http, "vllm:generation_tokens_total").get((), 0.0) > 0,
        }

    seen(lambda: there() == expected)
    assert there() == expected
    assert sum(read(http, "caesura_scrape_failures_total").values()) == 0


# --- router ----------------------------------------------------------------------------------------------------


def test_every_turn_of_a_program_reaches_its_home_through_both_ingresses(site: Site) -> None:
    before, routers = site.known(), site.routers()
    programs = [f"home-{n}" for n in range(24)]
    with ThreadPoolExecutor(12) as pool:
        for one in [pool.submit(site.live, program, 5, n) for n, program in enumerate(programs)]:
            one.result()
    assert [site.turns_at_home(program) for program in programs] == [5] * len(programs)
    assert site.known() - before == len(programs), "no replica knows a program that lives on another"
    assert min(replica["programs"] for replica in site.statistics().values()) > 0
    after = site.routers()
    sent = [sum(router["placements"].values()) for router in after]
    assert sum(sent) - sum(sum(router["placements"].values()) for router in routers) == 5 * len(programs)
    assert min(sent) > 0, "both ingresses took part"
    assert counted(after, "placements", "moved_for_load", "moved_from_lost", "hashed", "found") == 0
    assert all(set(router["replicas"]) == set(site.statistics()) for router in after)


def test_first_turns_that_race_on_both_ingresses_land_together(site: Site) -> None:
    before = site.known()
    programs = [f"race-{n}" for n in range(16)]
    with ThreadPoolExecutor(48) as pool:
        turns = [pool.submit(site.turn, program, [n + 10] * 64) for n, program in enumerate(programs) for _ in range(6)]
        for one in turns:
            one.result()
    assert site.known() - before == len(programs), "no program is split"
    assert [site.turns_at_home(program) for program in programs] == [6] * len(programs)


def test_programs_go_on_without_the_store_and_new_ones_are_not_split(site: Site) -> None:
    old = [f"home-{n}" for n in range(24)]
    new = [f"alone-{n}" for n in range(12)]
    before = site.known()
    site.redis.stop()
    try:
        with ThreadPoolExecutor(24) as pool:
            turns = [pool.submit(site.turn, program, [n + 10] * 64) for n, program in enumerate(old)]
            turns += [pool.submit(site.turn, program, [n + 10] * 64) for n, program in enumerate(new) for _ in range(4)]
            for one in turns:
                one.result()
        known, alone = site.known() - before, site.routers()
        assert counted(alone, "placements", "found", "hashed") > 0
        assert counted(alone, "fallbacks", "store_gone") > 0
    finally:
        site.redis.start()
    until(lambda: all(router["store"]["healthy"] for router in site.routers()), "the store is back")
    whole = dict.fromkeys(old, 6) | dict.fromkeys(new, 4)
    told = {**site.split(whole), "then": alone}
    assert known == len(new), str(told)  # pytest shortens what is no text
    for program in (*old, *new):
        site.turn(program, [10] * 64)
    assert [site.turns_at_home(program) for program in old] == [7] * len(old)
    assert [site.turns_at_home(program) for program in new] == [5] * len(new)
    assert site.known() - before == len(new)


def test_draining_moves_programs_at_their_pauses(site: Site) -> None:
    programs = [f"home-{n}" for n in range(24)]
    first, second = site.statistics()
    answer = site.http.post("/admin/drain", json={"replica": first})
    assert (answer.status_code, answer.json()) == (200, {"replica": first, "draining": True})
    until(lambda: all(r["replicas"][first].get("draining") for r in site.routers()), "both ingresses know")
    moved = counted(site.routers(), "placements", "moved_from_draining")
    with ThreadPoolExecutor(12) as pool:
        for one in [pool.submit(site.turn, program, [n + 10] * 64) for n, program in enumerate(programs)]:
            one.result()
    assert counted(site.routers(), "placements", "moved_from_draining") > moved
    busy = site.statistics()[first]["running"]
    assert busy == 0
    turns = {program: site.turns_at_home(program) for program in programs}
    assert site.http.post("/admin/drain", json={"replica": first, "drain": False}).status_code == 200
    until(lambda: not any(r["replicas"][first].get("draining") for r in site.routers()), "both ingresses know")
    for program in programs:
        site.turn(program, [10] * 64)
    assert {program: site.turns_at_home(program) - turns[program] for program in programs} == dict.fromkeys(programs, 1)
    assert second in site.statistics()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"replica": "no-such"}, 404),
        ({}, 400),
        ({"replica": "x", "drain": "yes"}, 400),
        ({"replica": "x", "speed": 1}, 400),
        ({"replica": ""}, 400),
    ],
)
def test_orders_that_make_no_sense(site: Site, body: dict[str, Any], status: int) -> None:
    assert site.http.post("/admin/drain", json=body).status_code == status


def test_programs_of_a_replica_that_is_killed_go_on_at_once_on_the_other(site: Site) -> None:
    programs = [f"home-{n}" for n in range(24)]
    dead, statistics = max(site.statistics().items(), key=lambda replica: replica[1]["programs"])
    psutil.Process(statistics["pid"]).kill()
    with ThreadPoolExecutor(12) as pool:
        for one in [pool.submit(site.turn, program, [n + 10] * 64) for n, program in enumerate(programs)]:
            one.result()
    assert counted(site.routers(), "placements", "moved_from_lost") > 0
    until(lambda: not any(dead in router["replicas"] for router in site.routers()), "both ingresses know")
    for program in programs:
        assert site.turns_at_home(program) > 0
