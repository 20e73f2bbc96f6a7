"""The direct data plane with memory for one program: who must wait waits before HAProxy; who is refused is told why."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx
import pytest

from tests.serving.direct_cluster import Ask, direct_cluster

pytestmark = pytest.mark.cluster

CONFIG = {
    "http": {"port": 0, "data_plane": "direct"},
    "replicas": {"count": 1, "kv_cache_bytes": 2 << 20, "cpu_offload_bytes": 0},
    "engine": {"max_model_len": 4000, "max_num_seqs": 8},
    # Without memory protection by the policy, programs are admitted up to 0.9 times the memory.
    "policy": {"name": "vllm"},
    "router": {"parameters": {"max_waiting": 1}},
    "redis": {"refresh_s": 0.2},
}
PATH = "/v1/completions"


SEEN_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def direct() -> Iterator[tuple[httpx.Client, Ask]]:
    with direct_cluster(CONFIG) as (url, ask), httpx.Client(base_url=url, timeout=120, verify=False) as client:
        yield client, ask


def turn(program: str, **more: Any) -> dict[str, Any]:
    """One that takes most of the memory."""
    prompt = [ord(program[0]), *(number % 400 for number in range(2600))]
    return {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "program_id": program, **more}


def await_router(ask: Ask, says: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not says(view := ask("router")[0]):
        assert time.monotonic() < deadline, view
        time.sleep(0.05)


def test_one_waits_for_room_and_one_more_is_refused_in_json(direct: tuple[httpx.Client, Ask]) -> None:
    http, ask = direct
    with ThreadPoolExecutor(2) as pool:
        with http.stream("POST", PATH, json=turn("lives", max_tokens=1300, stream=True)) as stream:
            pieces = stream.iter_bytes()
            assert next(pieces).startswith(b"data: ")
            await_router(ask, lambda view: any(replica["running"] for replica in view["replicas"].values()))
            others = [pool.submit(http.post, PATH, json=turn(name)) for name in ("one", "two")]
            refused = next(as_completed(others))
        answer = refused.result()
        (waits,) = set(others) - {refused}
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("overloaded_error", "queue_full")
        assert waits.result().status_code == 200
    await_router(ask, lambda view: view["open"] == view["turns"] == view["waiting"] == 0)
