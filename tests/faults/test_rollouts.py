"""Rollouts under updates of the weights: programs whose tokens are recorded, two updates, and a replica killed."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from replicas.tiny.model import tiny_model_directory, write_tiny_model
from tests.faults.promises import Promised
from tests.faults.stand import Stand
from tests.faults.under_load import ANSWERED_WITHIN_S, clients

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

FAULT = "weights updated twice, a replica killed, under rollouts"
PROGRAMS, LONG_PROGRAMS = 30, 1000
AT_ONCE, LONG_AT_ONCE = 30, 64
TURNS = 3
SAMPLES = 5
"""Programs of one task: they begin with the same prompt."""
TOKENS = (24, 60, 40)
"""Tokens of each turn."""
TOOL_TOKENS = 17
"""Tokens of a tool's answer."""
VOCABULARY = range(300, 2000)
PRECISION = 1e-3
"""Largest difference of two log probabilities of the same token: batches are computed in other orders."""
RETRIES_WITHIN_S = 300.0


@dataclass
class Trajectory:
    """A program, as its client saw it."""

    name: str
    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)


class Rollout:
    """Programs whose client runs the tools.

    Args:
        client: for the cluster.
        prefix: of the programs' names.
        programs: their number.
        at_once: the number that runs at the same time.
    """

    def __init__(self, client: httpx.AsyncClient, prefix: str, programs: int, at_once: int) -> None:
        self._client = client
        self._prefix = prefix
        self._slots = asyncio.Semaphore(at_once)
        self.turns = 0
        self.long_tools_end = asyncio.Event()
        """Every second one of the last programs waits for a tool before its last turn until then."""
        self._first_long = programs - at_once
        self.total = programs * TURNS
        self.trajectories = [Trajectory(f"{prefix}-{number}") for number in range(programs)]

    async def run(self) -> None:
        """Run all programs to their end."""
        await asyncio.gather(*(self._program(n, one) for n, one in enumerate(self.trajectories)))

    async def reached(self, share: float) -> None:
        """Wait until this share of the turns has ended."""
        while self.turns < share * self.total:  # noqa: ASYNC110 - of turns that others count
            await asyncio.sleep(0.02)

    async def _program(self, number: int, trajectory: Trajectory) -> None:
        async with self._slots:
            chance = random.Random(number // SAMPLES)
            context = chance.choices(VOCABULARY, k=70)
            headers = {
                "x-session-id": trajectory.name,
                "x-parent-session-id": f"{self._prefix}-task-{number // SAMPLES}",
                "x-record": "tokens",
            }
            for turn, tokens in enumerate(TOKENS):
                sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
                body = {"token_ids": context, "sampling_params": sampling, "model": "tiny"}
                ids, logprobs = await self._asked(body, headers, is_stream=(number + turn) % 2 == 0)
                trajectory.prompts.append(context)
                trajectory.outputs.append(ids)
                trajectory.logprobs.append(logprobs)
                self.turns += 1
                await asyncio.sleep(chance.uniform(0.0, 0.1))
                if number % 2 and number >= self._first_long and turn == TURNS - 2:
                    await self.long_tools_end.wait()
                context = context + ids + chance.choices(VOCABULARY, k=TOOL_TOKENS)

    async def _asked(
        self, body: dict[str, Any], headers: dict[str, str], *, is_stream: bool
    ) -> tuple[list[int], list[float]]:
        """Ask for a turn, again where it was rejected before it began."""
        until_s = time.monotonic() + RETRIES_WITHIN_S
        while True:
            try:
                return await self._turn(body, headers, is_stream=is_stream)
            except Rejected:
                assert time.monotonic() < until_s
                await asyncio.sleep(1.0)

    async def _turn(
        self, body: dict[str, Any], headers: dict[str, str], *, is_stream: bool
    ) -> tuple[list[int], list[float]]:
        path = "/inference/v1/generate"
        if not is_stream:
            answer = await self._client.post(path, json=body, headers=headers)
            await check(answer)
            choices = answer.json()["choices"]
        else:
            choices = []
            async with self._client.stream("POST", path, json={**body, "stream": True}, headers=headers) as answer:
                await check(answer)
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if not choices and event.get("error", {}).get("type") == "overloaded_error":
                            raise Rejected(line)  # it waited, so that its stream had begun
                        assert "error" not in event, event
                        choices += event["choices"]
                assert line == "" or line == "data: [DONE]", line
        ids = [one for choice in choices for one in choice["token_ids"]]
        return ids, [one["logprob"] for choice in choices for one in choice["logprobs"]["content"]]


class Rejected(Exception):
    """A turn was rejected before it began, and may be repeated."""


async def check(answer: httpx.Response) -> None:
    """Raise Rejected for a 503, and fail for any other error."""
    if not answer.is_success:
        text = (await answer.aread()).decode()
        if answer.status_code == 503:
            raise Rejected(text)
        raise AssertionError(text)


async def recorded(client: httpx.AsyncClient, name: str) -> list[dict[str, Any]]:
    """The recorded turns of a program."""
    answer = await client.get(f"/v1/programs/{name}/tokens", params={"limit": 100})
    assert answer.is_success, answer.text
    return list(answer.json()["data"])


async def update(client: httpx.AsyncClient, version: str, path: Path) -> None:
    """Update the weights of all replicas. It is repeated while a replica is being replaced."""
    until_s = time.monotonic() + RETRIES_WITHIN_S
    body = {"version": version, "path": str(path)}
    while not (answer := await client.post("/admin/weights", json=body)).is_success:
        assert answer.status_code in (502, 503, 504), answer.text
        assert time.monotonic() < until_s, answer.text
        await asyncio.sleep(0.5)


def versions(turn: dict[str, Any]) -> list[str]:
    """The versions of a turn's tokens, in their order."""
    return [span["version"] for span in turn["answers"][0]["weights"]]


def complete(trajectory: Trajectory, turns: Sequence[dict[str, Any]]) -> bool:
    """Whether the record is what the client got, in all its turns."""
    return [turn["status"] for turn in turns] == ["completed"] * TURNS and all(
        turn["prompt_token_ids"] == prompt
        and turn["answers"][0]["token_ids"] == output
        and len(output) == tokens
        and near(turn["answers"][0]["logprobs"], logprobs)
        for turn, prompt, output, logprobs, tokens in zip(
            turns, trajectory.prompts, trajectory.outputs, trajectory.logprobs, TOKENS, strict=True
        )
    )


def near(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= PRECISION for a, b in zip(one, other, strict=True))


def differs(undisturbed: Trajectory, turns: Sequence[dict[str, Any]], first: str) -> bool:
    """Whether tokens that the first weights computed are others than without a disturbance."""
    for turn, ids, logprobs in zip(turns, undisturbed.outputs, undisturbed.logprobs, strict=True):
        [answer] = turn["answers"]
        change = next((span["from"] for span in answer["weights"] if span["version"] != first), len(ids))
        if answer["token_ids"][:change] != ids[:change] or not near(answer["logprobs"][:change], logprobs[:change]):
            return True
        if change < len(ids):
            break  # the context is another one from here on
    return False


def tagged(turns: Sequence[dict[str, Any]], order: Sequence[str]) -> bool:
    """Whether each token has a version, and no version comes before an older one."""
    seen = [version for turn in turns for version in versions(turn)]
    places = [order.index(version) for version in seen]
    return places == sorted(places) and all(turn["answers"][0]["weights"][0]["from"] == 0 for turn in turns)


async def test_rollouts_survive_updates_of_the_weights_and_a_killed_replica(
    whole: Stand, is_long: bool, promised: Promised, tmp_path: Path
) -> None:
    programs, at_once = (LONG_PROGRAMS, LONG_AT_ONCE) if is_long else (PROGRAMS, AT_ONCE)
    own, other = tiny_model_directory(), tmp_path / "step-1"
    write_tiny_model(other, seed=1)
    async with clients(whole.url) as client:
        await update(client, "step-0", own)
        undisturbed = Rollout(client, f"still-{time.time()}", programs, at_once)
        undisturbed.long_tools_end.set()
        await undisturbed.run()
        rollout = Rollout(client, f"shaken-{time.time()}", programs, at_once)
        running = asyncio.create_task(rollout.run())
        await rollout.reached(0.3)
        await update(client, "step-1", other)
        await rollout.reached(0.5)
        victim = max(await asyncio.to_thread(whole.replicas), key=lambda one: int(one["running"]))
        psutil.Process(victim["pid"]).kill()
        await rollout.reached(0.6)
        await update(client, "step-2", own)
        rollout.long_tools_end.set()
        await asyncio.wait_for(running, ANSWERED_WITHIN_S * (10 if is_long else 1))

        records = {one.name: await recorded(client, one.name) for one in rollout.trajectories}
        pairs = list(zip(undisturbed.trajectories, rollout.trajectories, strict=True))
        wholes = sum(complete(one, records[one.name]) for one in rollout.trajectories)
        others = sum(differs(still, records[one.name], "step-0") for still, one in pairs)
        order = ("step-0", "step-1", "step-2")
        tags = sum(tagged(records[one.name], order) for one in rollout.trajectories)
        promised(FAULT, "whole trajectories", wholes, unit=f"of {programs}", exactly=programs)
        promised(FAULT, "trajectories with other tokens before the first update", others, exactly=0)
        promised(FAULT, "trajectories with a version for each token", tags, unit=f"of {programs}", exactly=programs)
        mixed = sum(len(versions(turn)) > 1 for turns in records.values() for turn in turns)
        print(f"{mixed} turns went on with other weights")
        seen = set(itertools.chain(*(versions(turn) for turns in records.values() for turn in turns)))
        assert seen == set(order)
        await asyncio.to_thread(whole.await_whole)
        weights = (await client.get("/admin/weights")).json()["models"][0]
        assert {one["version"] for one in weights["replicas"]} == {"step-2"} == {weights["version"]}
        for one in (*undisturbed.trajectories, *rollout.trajectories):
            assert (await client.delete(f"/v1/programs/{one.name}/tokens")).is_success
