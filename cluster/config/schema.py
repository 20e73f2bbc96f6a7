"""The schema of the configuration, which is one YAML file. It is frozen, and unknown keys are rejected.

`cluster.config.loader` reads the file. The names of keys contain their units (``_s`` for seconds, ``_tokens``,
``_bytes``). Every field has a default, so that an empty file serves the built-in tiny model on this machine.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from cluster.config.models import (
    CLASS_PREFIX,
    ClassRule,
    EngineArguments,
    FurtherModel,
    ModelConfig,
    ModelId,
    ReplicaConfig,
    adapter_model,
    check_adapters,
)
from cluster.config.sections import (
    AuthConfig,
    BatchesConfig,
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
    """The router, which chooses the replica of each turn."""

    name: str = OUR_ROUTER
    """The name of a router. `caesura` places programs. The others are Ray's own."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """With the router `caesura`, the parameters of its placement, which `caesura config schema` lists. With another
    router, the keyword arguments of Ray's router."""
    quarantine_s: float = Field(600.0, gt=0)
    """Seconds for which a request is rejected after it crashed a replica, or after two replicas died while they worked
    on it."""

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
    """The scheduling policy: which turn runs next, and which program keeps its KV during a tool call."""

    name: str = "caesura"
    """The name of a policy."""
    parameters: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """The policy's parameters. `caesura config schema` lists them."""
    order: str | None = None
    """The name of a policy whose order of turns is used instead, with that policy's default parameters. null: the order
    of `name`."""
    pause: str | None = None
    """The name of a policy whose decisions about the KV of paused programs are used instead, with that policy's default
    parameters. null: the decisions of `name`."""
    budget: str | None = None
    """The name of a policy whose token budget of a step is used instead, with that policy's default parameters. null:
    the budget of `name`."""

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
    """The URL of a Redis, or `embedded`, with which `caesura serve` starts a Redis server for the cluster. With
    `?password_file=PATH` at the end of the URL, each machine reads the password from this file."""
    path: str | None = None
    """Directory in which the embedded Redis stores its data. null: the data is lost when the cluster stops."""
    timeout_s: float = Field(0.5, gt=0, le=60)
    """Timeout of each call of Redis in seconds. After it, the cluster continues without the answer."""
    refresh_s: float = Field(1.0, gt=0)
    """Seconds between two exchanges of tool statistics: a replica writes its own and reads those of the others. A lower
    value spreads them sooner, and makes more calls of Redis. With more than 32 replicas the exchanges are rarer, in
    proportion to their number."""
    expiry_s: float = Field(7 * 24 * 3600.0, gt=0)
    """Seconds after which the statistics of a replica that no longer writes are deleted."""


SessionHeader = Annotated[
    str,
    AfterValidator(lambda name: name.lower().replace("_", "-")),
    Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_-]+$"),
]
"""The name of a header, in any case."""


class HttpConfig(Section):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on. 0: any free port."""
    ingress_replicas: int = Field(1, ge=1, le=64)
    """Number of ingress processes, which handle HTTP requests. If it is not set, `caesura serve` starts two on a
    machine with 8 cores or more, and the chart starts two if its workers request 8 CPUs or more. With two, requests are
    served while one of them is replaced."""
    trust_request_start: bool = False
    """Whether a turn's latency starts at the time in the header `X-Request-Start: t=<unix seconds>`. It then includes
    the time in queues in front of Caesura. Use it only behind a proxy of yours that sets the header, since a client
    that sets the header could change its SLO verdicts."""
    max_concurrent_requests: int = Field(1024, ge=1)
    """Maximum number of requests in flight in one ingress. Further requests get 503."""
    max_body_bytes: int = Field(8 << 20, ge=1024)
    """Maximum size of a request's body in bytes. Larger bodies get 413."""
    max_header_bytes: int = Field(32 << 10, ge=1024)
    """Maximum size of a request's headers in bytes. Larger headers get 431."""
    max_json_depth: int = Field(64, ge=4, le=500)
    """Maximum depth of nested JSON. Deeper JSON gets 400."""
    request_timeout_s: float = Field(1200.0, gt=0)
    """Maximum duration of a turn in seconds. A longer turn ends with an error."""
    shutdown_s: float = Field(30.0, ge=0, le=3600)
    """Seconds that requests in flight may still take when `caesura serve` is stopped. After that, they end with an
    error. Set it below the time that your service manager gives a process between SIGTERM and SIGKILL."""
    session_headers: tuple[SessionHeader, ...] = ("x-correlation-id",)
    """Further headers whose value names the program of a request. They are read if nothing else names it. Add the
    header of your own clients. Remove `x-correlation-id` if a gateway of yours sets another value for each request,
    since each request is then a program of its own."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call this server from a browser, such as `https://chat.example.com`; `*`: all. A
    page of another origin cannot read the answers."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """What happens to fields, values and tools of `/v1/responses` that have no effect here. `ignore`: the response
    names them. `refuse`: the request gets 400."""
    admin: bool = True
    """Whether the /admin routes are served (policy switch, statistics, cache reset). With `auth.file` they need the
    role `admin`."""


class LimitsConfig(Section):
    """Limits on programs, on pinned KV and on calls of a replica's scheduler."""

    timeout_s: float = Field(5.0, gt=0)
    """Timeout of a call of a replica's scheduler in seconds."""
    max_pin_s: float = Field(600.0, gt=0)
    """Maximum time for which a paused program's KV stays pinned, in seconds. Policies and clients cannot exceed it."""
    max_programs: int = Field(100_000, ge=1)
    """Maximum number of programs in the memory of a replica. Beyond it, the least recently used one is forgotten."""
    program_ttl_s: float = Field(3600.0, gt=0)
    """Seconds without a turn after which a program counts as ended."""
    starvation_s: float = Field(60.0, gt=0)
    """Seconds of waiting for admission after which a turn counts as starved. It affects only the metrics."""


class MetricsConfig(Section):
    """Metrics for Prometheus."""

    enabled: bool = True
    """Whether metrics are counted and exported."""


class RecordsConfig(Section):
    """Bounds of the recorded tokens of programs (`x-record: tokens`), which are stored in Redis. Where one is reached,
    a turn that asks for it is rejected before it begins. A turn that has begun is stored whole.
    """

    retention_s: float = Field(24 * 3600.0, ge=1, le=366 * 24 * 3600)
    """Seconds after its last recorded turn, after which the record of a program is deleted."""
    program_bytes: int = Field(16 << 20, ge=1024)
    """Size from which on a program can record no further turns, in bytes. A token of a program's last context takes 4
    bytes, and a token of an output 12."""
    tenant_bytes: int = Field(96 << 20, ge=1024)
    """Size of all records of a tenant from which on it can record no further turns, in bytes."""
    total_bytes: int = Field(96 << 20, ge=1024)
    """Size of all records from which on no further turns can be recorded, in bytes. Redis needs this memory beside its
    other data."""


class ProgramsConfig(Section):
    """Limits of runs: programs whose loop of turns and tools runs in the cluster."""

    lease_s: float = Field(5.0, gt=0, le=600)
    """Lease of a run in seconds. When an ingress dies, another ingress continues its runs after this time."""
    retention_s: float = Field(24 * 3600.0, ge=1, le=366 * 24 * 3600)
    """Seconds for which a finished response and its log can be read."""
    max_open: int = Field(1024, ge=1)
    """Maximum number of runs in flight in one ingress. Further ones get 503."""
    max_turns: int = Field(64, ge=1)
    """Maximum number of turns of a run. In the last one, the model cannot call tools."""
    max_tool_calls: int = Field(256, ge=0)
    """Maximum number of tool calls of a run."""
    max_wall_s: float = Field(3600.0, gt=0)
    """Maximum duration of a run in seconds. A longer run ends as incomplete. If its ingress died, the time until
    another ingress continues the run counts as at most one lease."""
    max_output_tokens: int = Field(262_144, ge=1)
    """Maximum number of tokens that all turns of a run generate together."""
    turn_attempts: int = Field(2, ge=1, le=10)
    """Maximum number of attempts of a turn whose replica fails."""


class CaesuraConfig(Section):
    """The configuration of one application: what a YAML file, `CAESURA__` variables and `--set` give together."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    engine: EngineArguments = Field(default_factory=dict)
    """vLLM engine arguments of the first model, such as max_model_len or max_num_seqs. Their
    types are checked; then they are passed to vLLM unchanged."""
    replicas: ReplicaConfig = Field(default_factory=ReplicaConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    slo: SloConfig = Field(default_factory=SloConfig)
    """SLO bounds for all models and tenants. Entries of `models` and `tenants` can override single bounds."""
    cost_model: str | None = Field(None, min_length=1)
    """Costs of a replica's steps, which policies use: a preset such as opt-13b/h800, or the path of a .json file that
    `caesura profile` wrote. null: on a GPU, each engine computes them from its model's configuration and the name of
    the device; on a CPU they are those of the built-in model, or else of Llama 8B on an H100."""
    redis: RedisConfig = Field(default_factory=RedisConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)
    logs: LogsConfig = Field(default_factory=LogsConfig)
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    programs: ProgramsConfig = Field(default_factory=ProgramsConfig)
    batches: BatchesConfig = Field(default_factory=BatchesConfig)
    records: RecordsConfig = Field(default_factory=RecordsConfig)
    predictor: PredictorConfig = Field(default_factory=PredictorConfig)
    models: dict[ModelId, FurtherModel] = Field(default_factory=dict)
    """Further models, each on its own replicas, by the name that clients send as `model`."""
    model_routing: dict[str, tuple[ClassRule, ...]] = Field(default_factory=dict)
    """Classes of programs, by the NAME that clients send as `model: auto:NAME`. A program goes to the model of the
    first rule that holds."""
    auth: AuthConfig = Field(default_factory=AuthConfig)
    tenants: dict[TenantName, TenantConfig] = Field(default_factory=dict)
    """Settings of tenants, by the names that API keys give them. A tenant without an entry has no limits, and metrics
    count it under `other`."""

    @field_validator("replicas")
    @classmethod
    def _knows_adapters(cls, replicas: ReplicaConfig, info: ValidationInfo) -> ReplicaConfig:
        first = info.data.get("model")
        return replicas if first is None else check_adapters(replicas, first.adapters)

    @field_validator("models")
    @classmethod
    def _other_names(cls, models: dict[str, FurtherModel], info: ValidationInfo) -> dict[str, FurtherModel]:
        first = info.data.get("model")
        if first is None:
            return models
        if first.id in models:
            raise ValueError(f"{first.id!r} is the name of the first model (model.id)")
        every = {first.id: first, **models}
        for name, model in every.items():
            if taken := [one for one in model.adapters if adapter_model(name, one) in every]:
                raise ValueError(f"{adapter_model(name, taken[0])!r} is the name of an adapter and of a model")
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
        first = info.data["model"]
        served = {
            first.id,
            *info.data["models"],
            *(
                adapter_model(name, adapter)
                for name, model in {first.id: first, **info.data["models"]}.items()
                for adapter in model.adapters
            ),
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

    @property
    def placement(self) -> Any:
        """The parameters of Caesura's router, a `router.settings.RouterSettings`; None: the router is Ray's own."""
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
        """By model id, the first model first: the configuration for the replicas of that model, in which it is the
        first.
        """
        first = FurtherModel(
            source=self.model.source,
            tool_parser=self.model.tool_parser,
            adapters=self.model.adapters,
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
                "model": ModelConfig(
                    id=model_id, source=own.source, tool_parser=own.tool_parser, adapters=own.adapters
                ),
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
        """Return the first model's bounds for a tenant. For another model, call it on that model's entry of
        `served`.
        """
        return self.slo if tenant not in self.tenants else self.tenants[tenant].slo.over(self.slo)

    @property
    def adapters(self) -> Mapping[str, str]:
        """By the name that clients send as `model`: the model of each LoRA adapter."""
        return {adapter_model(one, name): one for one, own in self.served.items() for name in own.model.adapters}

    @property
    def num_replicas(self) -> int:
        """Largest number of replicas of all models."""
        return self.replicas.servers + sum(model.replicas.servers for model in self.models.values())
