"""Runners over one log, each as if it were in a process of its own."""

from collections.abc import Mapping
from typing import Any

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.tools import ToolResult
from cluster.runs.runner import ProgramRunner
from cluster.store.runs.store import RunStore
from tests.programs.scripted_runs import ScriptedReplicas, ScriptedTools

LEASE_S = 0.6


class Runners:
    """Makes runners that share one log, each as if it were in a process of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.made: list[ProgramRunner] = []
        self.stores: list[RunStore] = []
        self.observed: list[ToolResult] = []

    def __call__(
        self,
        replicas: ScriptedReplicas,
        tools: ScriptedTools | None = None,
        tenants: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> ProgramRunner:
        """Make a runner. ``tenants`` name tools of `tools.defined`, which has every tool that they name."""
        number = len(self.made)
        store = RunStore(self.url, owner=f"runner-{number}", timeout_s=2.0, lease_s=LEASE_S, retention_s=60.0)
        config = CaesuraConfig.model_validate(self._configuration(tenants or {}, limits))
        runner = ProgramRunner(
            name=f"runner-{number}",
            store=store,
            replicas=replicas,
            tools=tools or ScriptedTools({}),
            config=config,
            clock=MonotonicClock(),
            observe=self.observed.append,
        )
        self.made.append(runner)
        self.stores.append(store)
        return runner

    def _configuration(self, tenants: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
        names = {name for tenant in tenants.values() for name in tenant["tools"]}
        defined = {name: {"kind": "python", "entry": "math:sin"} for name in names}
        return {"programs": {"lease_s": LEASE_S, **limits}, "tenants": tenants, "tools": {"defined": defined}}
