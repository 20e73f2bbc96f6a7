"""`/metrics` of a real cluster with two ingresses: what is read there is what clients experienced."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from served import served

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SLO_S = 60.0
CONFIG = {
    "http": {"port": 0, "ingress_replicas": 2, "trust_request_start": True, "max_concurrent_requests": 8},
    "replicas": {"count": 1, "kv_cache_bytes": 16 << 20},
    "engine": {"max_model_len": 2048, "max_num_seqs": 8},
    "slo": {"ttft_s": SLO_S},
    "store": {"refresh_s": 0.2},
}
WITHIN_S = 60.0
"""Ray's processes report every ten seconds unless told otherwise."""


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file = tmp_path_factory.mktemp("metrics") / "caesura.yaml"
    Path(file).write_text(yaml.safe_dump(CONFIG))
    with served(file) as url, httpx.Client(base_url=url, timeout=60.0) as client:
        yield client


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


def until(condition: Callable[[], bool]) -> None:
    """Look again and again; what does not come fails in the assertion after it."""
    deadline_s = time.monotonic() + WITHIN_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.5)


def turn(http: httpx.Client, program: str, *, last: bool = False, waited_s: float = 0.0, **more: Any) -> None:
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
        turn(http, f"p{number}", waited_s=2 * SLO_S if late else 0.0, stream=True)
        turn(http, f"p{number}")
        turn(http, f"p{number}", last=True, stream=True)
    ends = "caesura_program_ends_total"
    until(lambda: sum(read(http, ends).values()) >= 6)
    counted = {labels: n for labels, n in read(http, ends, "verdict").items() if n}
    assert counted == {("good",): 5, ("late",): 1}
    assert read(http, "caesura_programs_total")[()] - before == 6
    assert read(http, "caesura_requests_total", "outcome", "model", "tenant")["ok", "tiny", "default"] == 18
    assert read(http, "caesura_good_requests_total")[()] == 17
    assert read(http, "caesura_slo_misses_total", "bound")[("ttft",)] == 1
    assert read(http, "caesura_ttft_seconds_count")[()] == 18
    assert read(http, "caesura_program_turns_count")[()] == 6


def test_what_a_client_got_wrong_is_no_turn(http: httpx.Client) -> None:
    before = read(http, "caesura_requests_total")
    wrong = {"model": "tiny", "prompt": [5] * 4000, "max_tokens": 4}
    assert http.post("/v1/completions", json=wrong, headers={"x-session-id": "wrong"}).status_code == 400
    turn(http, "right", last=True)
    until(lambda: read(http, "caesura_requests_total") != before)
    assert read(http, "caesura_requests_total")[()] == before[()] + 1


def test_the_replica_and_the_router_are_there_too(http: httpx.Client) -> None:
    until(
        lambda: read(http, "caesura_total_blocks") != {} and read(http, "caesura_replicas", "state").get(("up",)) == 2
    )
    assert read(http, "caesura_total_blocks")[()] > 0
    assert read(http, "caesura_replicas", "state")["up",] == 2  # each ingress sees the one replica
    assert read(http, "caesura_store_up", "by")[("placements",)] == 2
    assert sum(read(http, "caesura_placements_total").values()) >= 18
    assert read(http, "vllm:generation_tokens_total")[()] > 0
    assert set(read(http, "caesura_scrape_failures").values()) == {0.0}
