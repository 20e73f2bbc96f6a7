"""The registry of plug-ins. A new policy, router or kind of tool needs one new file and one line here.

Entries are dotted ``module:attribute`` paths. They are resolved on first use, so that a plug-in that is not used is not
imported. The choices in the configuration and in the help of the command line come from here.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from cluster.core.errors import ConfigError


class Registry(Mapping[str, str]):
    """The plug-ins of one kind: their names, each with the path of its implementation."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> str:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def load(self, name: str) -> Any:
        """Return the object that is registered under ``name``.

        Raises:
            ConfigError: there is no such name. The message lists the registered names.
        """
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind} {name!r}; choose one of: {', '.join(self._entries)}")
        return _attribute(self._entries[name])


def read_cost_model(source: str) -> Any:
    """Read the cost model of a preset, or of a file that `caesura profile` wrote.

    Args:
        source: the preset's name or the file's path.

    Raises:
        ConfigError: there is no such preset, or the file is not a cost model.
    """
    return _attribute("replicas.presets:cost_model")(source)


def _attribute(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


POLICIES = Registry(
    "policy",
    {
        "caesura": "replicas.policies.caesura:CaesuraParameters",
        "vllm": "replicas.policies.baselines:VllmParameters",
        "plas": "replicas.policies.baselines:PlasParameters",
        "infercept": "replicas.policies.infercept:InferceptParameters",
        "lamps": "replicas.policies.mars:LampsParameters",
        "mars": "replicas.policies.mars:MarsParameters",
        "augserve": "replicas.policies.augserve:AugserveParameters",
        "continuum": "replicas.policies.continuum:ContinuumParameters",
        "continuum2": "replicas.policies.continuum:ContinuumCostParameters",
    },
)

PEERS = Registry(
    "peer's scheduler",
    {
        "vllm-priority": "replicas.peers.vllm_priority:VllmPriorityParameters",
        "vllm-v0": "replicas.peers.vllm_v0:VllmV0Parameters",
        "agentinfer": "replicas.peers.agentinfer:AgentInferParameters",
        "sglang": "replicas.peers.sglang:SglangParameters",
        "sglang-lpm": "replicas.peers.sglang:SglangLpmParameters",
    },
)
"""Schedulers that others publish. Only the simulator has them, for comparisons; no configuration can name them."""

OUR_ROUTER = "caesura"
"""Name of the router that places programs. The other routers are Ray's, and do not place programs."""

ROUTERS = Registry(
    "router",
    {
        OUR_ROUTER: "router.pinned_router:PinnedRequestRouter",
        "consistent_hash": "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter",
        "power_of_two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
        "prefix_affinity": "router.prefix_affinity:PrefixAffinityRouter",
    },
)

FILTERS = Registry(
    "filter",
    {
        "model": "router.placement_policy:SameModel",
        "health": "router.placement_policy:NotSuspect",
        "capacity": "router.placement_policy:LargeEnough",
        "tenant": "router.placement_policy:TenantSpread",
        "drain": "router.placement_policy:NotDraining",
    },
)

SCORERS = Registry(
    "scorer",
    {
        "start": "router.placement_policy:Start",
        "missing": "router.placement_policy:Missing",
        "pace": "router.placement_policy:Pace",
        "memory": "router.placement_policy:Memory",
    },
)

OUR_AUTOSCALER = "caesura"
"""Name of the autoscaling policy that serves. The simulator has the others too."""

AUTOSCALERS = Registry("autoscaling policy", {OUR_AUTOSCALER: "router.autoscaling.program_load:ProgramLoad"})

ROUTER_PARAMETERS = Registry("router with parameters of its own", {OUR_ROUTER: "router.settings:RouterSettings"})
"""The classes of routers' parameters. Ray's routers are not here: they take keyword arguments, which are checked only
when the routers start."""

TOOL_KINDS = Registry(
    "tool kind",
    {
        "python": "tools_runtime.kinds.python:PythonKind",
        "http": "tools_runtime.kinds.http:HttpKind",
        "command": "tools_runtime.kinds.command:CommandKind",
        "mcp": "tools_runtime.kinds.mcp:McpKind",
    },
)

PREDICTORS = Registry(
    "predictor",
    {
        "statistics": "predictor_service.statistics_model:StatisticsModel",
        "encoder": "predictor_service.encoder:EncoderModel",
        "lamps": "predictor_service.paper_encoders:LampsModel",
        "augserve": "predictor_service.paper_encoders:AugserveModel",
        "tabular": "predictor_service.tabular:TabularModel",
    },
)
"""The models of predictions. Each has `fit(programs)`, `save(directory)`, `load(directory)`, and the methods of the
protocols in `predictor_service.model` that it implements."""

BASED_PREDICTORS = frozenset({"encoder", "lamps", "augserve"})
"""The models whose `fit(programs, base)` also needs the directory of a pretrained checkpoint."""

TRACE_FORMATS = Registry(
    "trace format",
    {
        "caesura": "cluster.offline.traces.caesura:FORMAT",
        "mooncake": "cluster.offline.traces.mooncake:FORMAT",
        "aiperf": "cluster.offline.traces.aiperf:FORMAT",
        "otel": "cluster.offline.traces.otel:FORMAT",
    },
)
"""The formats that `caesura trace` reads and writes. Each is a `cluster.offline.traces.format.TraceFormat`."""
