"""The configuration: one YAML file, frozen, unknown keys rejected. `cluster.config.loader` reads it.

Units are in the names (``_s`` seconds, ``_tokens``, ``_bytes``). Every field has a default, so that an empty file
serves the built-in tiny model on this machine.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from cluster.config.models import (
    CLASS_PREFIX,
    ClassRule,
    EngineArgument,
    FurtherModel,
    ModelConfig,
    ModelId,
    ReplicaConfig,
)
from cluster.config.sections import (
    AuthConfig,
    LogsConfig,
    PredictorConfig,
    Section,
    TenantConfig,
    TenantName,
    TracingConfig,
)
from cluster.config.sections import SloConfig as SloConfig
from cluster.config.tools import ToolsConfig
from cluster.core.registry import OUR_ROUTER, POLICIES, ROUTER_PARAMETERS, ROUTERS


class RouterConfig(Section):
    """Which replica a turn goes to."""

    name: str = OUR_ROUTER
    """A registered router: `caesura` places programs; the others are Ray's own."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """The parameters of `caesura`'s placement, which `caesura config schema` lists; or keyword arguments of Ray's."""
    quarantine_s: float = Field(600.0, gt=0)
    """How long a request is refused of which a replica died, or under which two did."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ROUTERS:
            raise ValueError(f"unknown router {name!r}; choose one of: {', '.join(ROUTERS)}")
        return name

    @field_validator("parameters")
    @classmethod
    def _fit(cls, parameters: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" in info.data and (name := info.data["name"]) in ROUTER_PARAMETERS:
            ROUTER_PARAMETERS.load(name).model_validate(parameters)
        return parameters


class PolicyConfig(Section):
    """What runs next, and what keeps its KV memory through a tool call."""

    name: str = "caesura"
    """A registered policy."""
    parameters: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """The policy's own parameters; `caesura config schema` lists them."""
    order: str | None = None
    """A registered policy whose order is taken in place of this one's, with its default parameters."""
    pause: str | None = None
    """The same for what becomes of a paused program's KV."""
    budget: str | None = None
    """The same for the tokens of a step."""

    @field_validator("name", "order", "pause", "budget")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in POLICIES:
            raise ValueError(f"unknown policy {name!r}; choose one of: {', '.join(POLICIES)}")
        return name

    @field_validator("parameters")
    @classmethod
    def _fit(cls, parameters: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" in info.data:  # else the name is what is wrong
            POLICIES.load(info.data["name"]).model_validate(parameters)
        return parameters


class RedisConfig(Section):
    """The Redis through which the processes of the cluster share state: placements, runs, statistics and SLO sums."""

    url: str = Field("embedded", pattern=r"^(embedded|rediss?://.+|unix://.+)$")
    """`embedded` starts a real Redis beside the cluster; else the URL of yours. `?password_file=PATH` at its end: the
    password is what this file says, on each machine."""
    path: str | None = None
    """Where the embedded Redis keeps its data; null forgets at the end."""
    timeout_s: float = Field(0.5, gt=0, le=60)
    """Every call to Redis ends within this time."""
    refresh_s: float = Field(1.0, gt=0)
    """How often a replica writes its own statistics and reads the others'."""
    expiry_s: float = Field(7 * 24 * 3600.0, gt=0)
    """Statistics of a replica that no longer writes are forgotten after this time."""


class HttpConfig(Section):
    """The HTTP surface."""

    data_plane: Literal["ingress", "direct"] = "ingress"
    """`direct`: the bytes of an answer go from the replica to the client through HAProxy alone, and through no process
    of the cluster's. One model, /v1/chat/completions, /v1/completions, tokens and probes; needs HAProxy."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    ingress_replicas: int = Field(1, ge=1, le=64)
    """Processes that take HTTP requests."""
    trust_request_start: bool = False
    """Count a turn's latency from the time that the header `X-Request-Start: t=<unix seconds>` tells, so that what it
    waited in front of Caesura is in it. For where a proxy of yours sets the header: who sends it decides on SLOs."""
    max_concurrent_requests: int = Field(1024, ge=1)
    """Requests in flight in one ingress before 503 is answered."""
    max_body_bytes: int = Field(8 << 20, ge=1024)
    """Larger bodies get 413."""
    max_header_bytes: int = Field(32 << 10, ge=1024)
    """Larger headers get 431."""
    max_json_depth: int = Field(64, ge=4, le=500)
    """JSON nested deeper gets 400."""
    request_timeout_s: float = Field(1200.0, gt=0)
    """A turn that takes longer ends in an error."""
    admin: bool = True
    """Serve the /admin routes (policy switch, statistics, cache reset). With `auth.file` they need the role `admin`."""


class LimitsConfig(Section):
    """Limits on programs, pinned KV and calls of a replica's scheduler."""

    timeout_s: float = Field(5.0, gt=0)
    """A call of a replica's scheduler that is not answered within this time fails."""
    max_pin_s: float = Field(600.0, gt=0)
    """A paused program's KV stays pinned at most this long without a next turn, whatever a policy or a client asks."""
    max_programs: int = Field(100_000, ge=1)
    """Programs that a replica remembers."""
    program_ttl_s: float = Field(3600.0, gt=0)
    """A program without a turn for this long has ended."""
    starvation_s: float = Field(60.0, gt=0)
    """A turn that waits longer for its admission counts as starved in the metrics. Nothing else depends on it."""


class MetricsConfig(Section):
    """Metrics for Prometheus."""

    enabled: bool = True
    """Count and export metrics."""


class ProgramsConfig(Section):
    """Programs whose loop of turns and tools runs in the cluster."""

    lease_s: float = Field(5.0, gt=0, le=600)
    """A program waits this long after its ingress died before another takes over."""
    retention_s: float = Field(24 * 3600.0, ge=1, le=366 * 24 * 3600)
    """How long finished responses and their logs can be read."""
    max_open: int = Field(1024, ge=1)
    """Programs in flight in one ingress before 503 is answered."""
    max_turns: int = Field(64, ge=1)
    """Turns of a run; the last one may call no tool."""
    max_tool_calls: int = Field(256, ge=0)
    """Tool calls of a run."""
    max_wall_s: float = Field(3600.0, gt=0)
    """A run that takes longer ends incomplete. Where its ingress died, the time until another one goes on counts as one
    lease at most."""
    max_output_tokens: int = Field(262_144, ge=1)
    """Tokens that all turns of a run generate together."""
    turn_attempts: int = Field(2, ge=1, le=10)
    """How often a turn is tried whose replica failed."""


class CaesuraConfig(Section):
    """The whole configuration."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    engine: dict[EngineArgument, Any] = Field(default_factory=dict)
    """vLLM engine arguments, passed through, such as max_model_len or max_num_seqs."""
    replicas: ReplicaConfig = Field(default_factory=ReplicaConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    slo: SloConfig = Field(default_factory=SloConfig)
    """Of all models and tenants; `models` and `tenants` may say otherwise, bound by bound."""
    cost_model: str | None = Field(None, min_length=1)
    """What a replica's steps cost, for the policies: a preset such as opt-13b/h800, or the path of a .json file that
    `caesura profile` wrote; null takes the preset that fits the model and what it runs on, if there is one."""
    redis: RedisConfig = Field(default_factory=RedisConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)
    logs: LogsConfig = Field(default_factory=LogsConfig)
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    programs: ProgramsConfig = Field(default_factory=ProgramsConfig)
    predictor: PredictorConfig = Field(default_factory=PredictorConfig)
    models: dict[ModelId, FurtherModel] = Field(default_factory=dict)
    """More models, by the names that clients send, each on replicas of its own."""
    model_routing: dict[str, tuple[ClassRule, ...]] = Field(default_factory=dict)
    """Names that clients send as `model: auto:NAME`; the first rule that holds says which model a program goes to."""
    auth: AuthConfig = Field(default_factory=AuthConfig)
    tenants: dict[TenantName, TenantConfig] = Field(default_factory=dict)
    """What is different for some tenants, by the names that keys give them. A tenant that is not here has no limits; in
    metrics all of those together are `other`."""

    @field_validator("models")
    @classmethod
    def _other_names(cls, models: dict[str, FurtherModel], info: ValidationInfo) -> dict[str, FurtherModel]:
        first = info.data.get("model")
        if first is not None and first.id in models:
            raise ValueError(f"{first.id!r} is the name of the first model (model.id)")
        return models

    @field_validator("model_routing")
    @classmethod
    def _lead_somewhere(
        cls, classes: dict[str, tuple[ClassRule, ...]], info: ValidationInfo
    ) -> dict[str, tuple[ClassRule, ...]]:
        if "model" not in info.data or "models" not in info.data:  # these are what is wrong
            return classes
        served = {info.data["model"].id, *info.data["models"]}
        for name, rules in classes.items():
            unknown = [rule.model for rule in rules if rule.model not in served]
            if unknown:
                raise ValueError(f"{name}: no model {unknown[0]!r} is served; there are: {', '.join(sorted(served))}")
            if not rules or not rules[-1].unconditional:
                raise ValueError(f"{name}: the last rule must name a model and no condition, so that one always holds")
        return classes

    @field_validator("tenants")
    @classmethod
    def _name_what_there_is(cls, tenants: dict[str, TenantConfig], info: ValidationInfo) -> dict[str, TenantConfig]:
        if {"model", "models", "model_routing", "tools"} - info.data.keys():  # these are what is wrong
            return tenants
        served = {
            info.data["model"].id,
            *info.data["models"],
            *(CLASS_PREFIX + one for one in info.data["model_routing"]),
        }
        for name, tenant in tenants.items():
            for key, named, there in (
                ("models", tenant.models, served),
                ("tools", tenant.tools, info.data["tools"].defined.keys()),
            ):
                if unknown := [one for one in named or () if one not in there]:
                    raise ValueError(f"{name}.{key}: there is no {unknown[0]!r}; there are: {', '.join(sorted(there))}")
        return tenants

    @field_validator("tools", "models", "model_routing", "predictor", "auth")
    @classmethod
    def _in_this_data_plane(cls, section: Any, info: ValidationInfo) -> Any:
        direct = "http" in info.data and info.data["http"].data_plane == "direct"
        match section:
            case ToolsConfig():
                asked: Any = section.defined or section.request_kinds
            case PredictorConfig():
                asked = section.mode == "service"
            case AuthConfig():
                asked = section.file
            case _:
                asked = section
        if direct and asked:
            raise ValueError("`http.data_plane: direct` cannot serve this; leave it out or choose `ingress`")
        return section

    @property
    def placement(self) -> Any:
        """The parameters of our router, `router.settings.RouterSettings`; None where the router is Ray's own."""
        if self.router.name not in ROUTER_PARAMETERS:
            return None
        shared = {
            "program_ttl_s": self.limits.program_ttl_s,
            "max_programs": self.limits.max_programs,
            "tenant_weights": {name: tenant.weight for name, tenant in self.tenants.items()},
        }
        return ROUTER_PARAMETERS.load(self.router.name).model_validate({**shared, **self.router.parameters})

    @property
    def served(self) -> Mapping[str, "CaesuraConfig"]:
        """By model id, the first model first: the configuration as the replicas of that model see it."""
        first = FurtherModel(
            source=self.model.source,
            tool_parser=self.model.tool_parser,
            engine=self.engine,
            replicas=self.replicas,
            cost_model=self.cost_model,
            slo=self.slo,
        )
        every = {self.model.id: first, **self.models}
        return {one: self._led_by(one, every) for one in every}

    def _led_by(self, model_id: str, every: Mapping[str, FurtherModel]) -> "CaesuraConfig":
        own = every[model_id]
        return self.model_copy(
            update={
                "model": ModelConfig(id=model_id, source=own.source, tool_parser=own.tool_parser),
                "engine": own.engine,
                "replicas": own.replicas,
                "cost_model": own.cost_model,
                "slo": own.slo.over(self.slo),
                "models": {
                    other: model.model_copy(update={"slo": model.slo.over(self.slo)})
                    for other, model in every.items()
                    if other != model_id
                },
            }
        )

    def slo_of(self, tenant: str) -> SloConfig:
        """The first model's bounds, for a tenant. (`served` has each model once as the first.)"""
        return self.slo if tenant not in self.tenants else self.tenants[tenant].slo.over(self.slo)

    @property
    def num_replicas(self) -> int:
        """Of all models."""
        return self.replicas.count + sum(model.replicas.count for model in self.models.values())
