"""Fault: all KV memory is full and all of it is held by programs that pause, and more come, and all come back."""

import asyncio
import json
import random
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.faults.promises import Promised
from tests.faults.stand import Stand, stand
from tests.faults.under_load import MODEL, Ended, Outcome, ask, clients, lost
from tests.serving.tool_site import ToolSite

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

FAULT = "KV memory full and everything held"
POLICIES = ("vllm", "continuum", "caesura")
BLOCKS = 102
"""Of each replica in the long form: one context of the largest size, and a little."""
CRAMPED: dict[str, Any] = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 3072}
HOST_BYTES = 64 << 20
OUTPUT = 16
RESUME_S = 0.1


class Program:
    """One whose tools its client runs: its context grows turn by turn."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.ended: list[Ended] = []
        self._random = random.Random(name)
        self._context = self._fresh(size)

    def _fresh(self, count: int) -> list[int]:
        return [self._random.randrange(300, 2000) for _ in range(count)]

    async def turn(self, client: httpx.AsyncClient, fresh: int = 0, **more: Any) -> None:
        """Ask for the next turn, ``fresh`` tokens later. It says that it comes back: other tests left programs that did
        not.
        """
        self._context += self._fresh(fresh)
        more = {"agentic_context": {"expected_resume": RESUME_S}, **more}
        body = {"model": MODEL, "prompt": self._context, "max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0.0}
        headers = {"x-session-id": self.name}
        ended = await ask(client, "/v1/completions", {**body, "return_token_ids": True, **more}, **headers)
        self.ended.append(ended)
        if ended.outcome is Outcome.DONE:
            self._context += json.loads(ended.text)["choices"][0]["token_ids"]


async def longest_wait_s(client: httpx.AsyncClient, programs: list[Program]) -> float:
    """Of their last turns, for memory: from arrival to admission, as the replica says."""
    told = [(await client.get(f"/v1/programs/{program.name}")).json() for program in programs]
    return max(one["turns"][-1]["queue_s"] for one in told)


async def all_return(url: str, name: str, paused: int, size: int, turns: int) -> tuple[float, float, list[Program]]:
    """Programs fill the memory and pause; one more comes, and then all come back together, some turns long.

    Answers: the share of the memory that was held; how long the one waited for some; the programs.
    """
    programs = [Program(f"{name}-{number}", size) for number in range(paused)]
    newcomer = Program(f"{name}-newcomer", size)
    async with clients(url) as client:
        await asyncio.gather(*(program.turn(client) for program in programs))
        held = (await client.get("/admin/statistics")).json()["replicas"]
        await newcomer.turn(client)
        waited_s = await longest_wait_s(client, [newcomer])

        async def goes_on(program: Program) -> None:
            for _ in range(turns):
                await program.turn(client, fresh=40)

        await asyncio.gather(*map(goes_on, [*programs, newcomer]))
    share = sum(one["held_blocks"] for one in held) / sum(one["total_blocks"] for one in held)
    return share, waited_s, [*programs, newcomer]


def outcomes(programs: list[Program]) -> tuple[int, int]:
    """Turns that were lost, and turns that ended in anything but an answer."""
    ended = [one for program in programs for one in program.ended]
    return lost(ended), sum(one.outcome is not Outcome.DONE for one in ended)


async def test_memory_that_is_full_of_holds_yields(whole: Stand, promised: Promised) -> None:
    """The shared cluster's memory holds 16 contexts of 3600 tokens."""
    held, waited_s, programs = await all_return(whole.url, f"full-{uuid.uuid4().hex}", paused=20, size=3600, turns=2)
    assert held > 0.9
    gone, failed = outcomes(programs)
    promised(FAULT, "turns lost", gone, exactly=0)
    promised(FAULT, "turns that failed", failed, exactly=0)
    promised(FAULT, "a hold yields", waited_s, unit="s", at_most=1)


@pytest.fixture(scope="module", params=[None, HOST_BYTES], ids=["no host tier", "host tier"])
def cramped(
    request: pytest.FixtureRequest, is_long: bool, tmp_path_factory: pytest.TempPathFactory, site: ToolSite
) -> Iterator[Stand]:
    """A cluster of replicas with little memory."""
    if not is_long:
        pytest.skip("with --long: two clusters more")
    replicas = {"cpu_offload_bytes": request.param or 0}
    with stand(tmp_path_factory.mktemp("cramped"), site, replicas=replicas, engine=CRAMPED) as cluster:
        yield cluster


@pytest.mark.parametrize("policy", POLICIES)
async def test_no_policy_comes_to_a_standstill(cramped: Stand, promised: Promised, policy: str) -> None:
    async with clients(cramped.url) as client:
        answer = await client.put("/admin/policy", json={"name": policy, "parameters": {}})
        assert answer.is_success, answer.text
    for size in (700, 1500, 2600):
        _, waited_s, programs = await all_return(cramped.url, f"{policy}-{size}", paused=12, size=size, turns=6)
        gone, failed = outcomes(programs)
        told = f"{policy}, contexts of {size}: "
        promised(FAULT, told + "turns lost", gone, exactly=0)
        promised(FAULT, told + "turns that failed", failed, exactly=0)
        promised(FAULT, told + "a hold yields", waited_s, unit="s", at_most=1)
    cramped.check_idle()
