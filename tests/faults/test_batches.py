"""What works on a batch is killed: every line of it is in the output, once."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.faults.stand import INGRESS, REPLICA, Stand
from tests.faults.under_load import clients

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

URL = "/v1/completions"
LINES, LONG_LINES = 200, 3000
TOKENS = 24
DONE_WITHIN_S = 600.0


async def test_an_ingress_that_works_on_a_batch_is_killed(
    whole: Stand, is_long: bool, promised: Callable[..., None]
) -> None:
    lines = LONG_LINES if is_long else LINES
    names = [f"line-{number}" for number in range(lines)]
    async with clients(whole.url) as client:
        batch = await begin(client, names)
        for round_ in range(4 if is_long else 1):
            reached = (round_ + 1) * lines // 6
            await reach(client, batch, lambda found, reached=reached: completed(found) >= reached)
            victims = whole.named(REPLICA if round_ == 3 else INGRESS)
            victims[0].kill()
            await asyncio.to_thread(whole.await_whole)
        done = await reach(client, batch, lambda found: found["ended"])
        found = Counter(await ids(client, done))
    missing = sum(name not in found for name in names)
    fault = "ingress killed while it works on a batch"
    promised(fault, "lines of the batch lost", missing, exactly=0)
    promised(fault, "lines of the batch in the output twice", sum(n > 1 for n in found.values()), exactly=0)
    promised(fault, "lines of the batch with an error", done["request_counts"]["failed"], exactly=0)


async def begin(client: httpx.AsyncClient, names: list[str]) -> str:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": TOKENS, "ignore_eos": True}
    lines = [json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": body}) for name in names]
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", "\n".join(lines).encode())}}
    file = (await client.post("/v1/files", **form)).raise_for_status().json()["id"]
    wanted = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
    return str((await client.post("/v1/batches", json=wanted)).raise_for_status().json()["id"])


def completed(found: dict[str, Any]) -> int:
    return int(found["request_counts"]["completed"])


async def reach(client: httpx.AsyncClient, batch: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The batch when it is so. Its ``ended`` says whether it has ended."""
    async with asyncio.timeout(DONE_WITHIN_S):
        while True:
            try:
                answer = await client.get(f"/v1/batches/{batch}")
            except httpx.TransportError:
                answer = httpx.Response(503)  # the ingress is dead
            if answer.status_code == 200:
                found = answer.json() | {"ended": answer.json()["status"] in ("completed", "failed", "expired")}
                if is_so(found) or found["ended"]:
                    return dict(found)
            await asyncio.sleep(0.1)


async def ids(client: httpx.AsyncClient, done: dict[str, Any]) -> list[str]:
    files = [done[key] for key in ("output_file_id", "error_file_id") if done[key] is not None]
    texts = [(await client.get(f"/v1/files/{file}/content")).raise_for_status().text for file in files]
    return [json.loads(line)["custom_id"] for text in texts for line in text.splitlines()]
