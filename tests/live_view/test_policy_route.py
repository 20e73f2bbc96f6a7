"""`PUT /admin/policy` sends a whole policy to all replicas."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from cluster.config.schema import CaesuraConfig
from cluster.http.administration import Administration

CONFIGURED = {"name": "caesura", "pause": "infercept", "parameters": {"turn_value": 3.0}}


class Fleet:
    """Replicas that take every policy."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    async def broadcast(self, method: str, policy: dict[str, Any]) -> list[dict[str, Any]]:
        self.sent.append(policy)
        return [policy]


@pytest.mark.parametrize(
    ("asked", "changed"),
    [
        ({"name": "caesura"}, {}),
        ({"name": "caesura", "parameters": {}}, {"parameters": {}}),
        ({"name": "caesura", "pause": "vllm"}, {"pause": "vllm"}),
    ],
)
async def test_the_configured_policy_has_the_configured_values_of_keys_that_are_left_out(
    asked: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert await sent(asked) == CONFIGURED | changed


async def test_another_policy_has_no_values_of_the_configured_one() -> None:
    assert await sent({"name": "vllm"}) == {"name": "vllm", "parameters": {}}


async def sent(body: dict[str, Any]) -> dict[str, Any]:
    """What the replicas get."""
    there = Administration()
    fleet = there._fleet = Fleet()  # type: ignore[assignment]
    there._config = CaesuraConfig.model_validate({"policy": CONFIGURED})

    async def read(_: Request) -> dict[str, Any]:
        return json.loads(json.dumps(body))

    there._reader = SimpleNamespace(json=read)  # type: ignore[assignment]
    await there.set_policy(Request({"type": "http"}))
    [policy] = fleet.sent
    return policy
