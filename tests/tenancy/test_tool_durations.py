"""What a key learns from `GET /v1/tools` of the calls of others."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.auth.keys import Caller, Role
from cluster.core.tools import Outcome, ToolId, ToolOffer, ToolResult
from cluster.http.routes import ToolRoutes
from cluster.store.durations import ToolDurations

SHELL = ToolOffer("shell", {"name": "shell"}, here=True, tool=ToolId.of_operator("shell"))


async def offers(tenant: str, definitions: Mapping[str, Any] | None) -> list[ToolOffer]:
    return [SHELL]


@pytest.mark.parametrize(
    ("role", "names"), [(Role.SERVE, ["shell"]), (Role.ADMIN, ["shell", "shell:acme-secret-deploy", "shell:ls"])]
)
async def test_only_an_administrator_sees_the_classes_of_calls(role: Role, names: list[str]) -> None:
    """They are words of the arguments of all tenants."""
    durations = ToolDurations()
    for name in ("shell:acme-secret-deploy", "shell:ls"):
        assert durations.observe(ToolResult("c", "shell", Outcome.OK, "", run_s=1.0, attempts=1, statistics_name=name))
    answer = await ToolRoutes(offers, durations.read).list(Caller("other", frozenset((role,))))
    [shell] = json.loads(bytes(answer.body))["data"]
    assert [each["name"] for each in shell["durations"]] == names
    assert shell["durations"][0]["run"]["count"] == 2
