"""Sections of the configuration that stand alone: SLOs, keys, tenants, traces, logs and predictions."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from cluster.core.program import MAX_ID_LENGTH
from cluster.core.slo import Slo

TenantName = Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""A tenant's name has no slash, which ends the tenant in a program's key, and nothing that a label must quote."""


class Section(BaseModel):
    """A frozen part of the configuration that rejects unknown keys and infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_as_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads `no` and `off` as false, and pydantic reads false as 0: a port or a limit that nobody meant.
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("must not be true or false")
        return value


class SloConfig(Section):
    """When a turn counts as good. null: that bound does not apply."""

    ttft_s: float | None = Field(1.0, gt=0)
    """Seconds from the intended arrival to the first token."""
    tpot_s: float | None = Field(None, gt=0)
    """Mean seconds between tokens after the first."""
    e2e_s: float | None = Field(None, gt=0)
    """Seconds from the intended arrival to the last token."""
    normalized_latency_s: float | None = Field(None, gt=0)
    """Seconds from arrival to the last token divided by the tokens generated."""

    @property
    def bounds(self) -> Slo:
        """The bounds as records are judged by them."""
        return Slo(self.ttft_s, self.tpot_s, self.e2e_s, self.normalized_latency_s)

    def over(self, wider: "SloConfig") -> "SloConfig":
        """These bounds where they are set, null included; else those of ``wider``."""
        return SloConfig(**wider.model_dump() | self.model_dump(exclude_unset=True))


class AuthConfig(Section):
    """API keys. Without a file every client may do everything: only where nobody else can reach the port."""

    file: str | None = Field(None, min_length=1)
    """A YAML or JSON file of keys, such as a mounted secret; `caesura keys new` makes entries for it."""
    reload_s: float = Field(2.0, gt=0)
    """How often the file is checked for changes."""


class TenantConfig(Section):
    """What is different for a tenant. Limits are of all ingresses together, in equal parts. null: no limit."""

    slo: SloConfig = Field(default_factory=SloConfig)
    """Bounds that count for this tenant, on every model; those that are not set are the model's."""
    weight: float = Field(1.0, gt=0, le=1000)
    """Its share of the memory where programs wait to be admitted, beside the other tenants'."""
    requests_per_s: float | None = Field(None, gt=0)
    """Requests that make work for a replica; more get 429."""
    burst: int = Field(32, ge=1)
    """Requests that may come at once after a quiet time."""
    max_concurrent: int | None = Field(None, ge=1)
    """Such requests at a time; more get 429."""
    max_programs: int | None = Field(None, ge=1)
    """Programs at a time whose loop runs in the cluster; more get 429."""
    models: tuple[str, ...] | None = None
    """Models and classes (`auto:NAME`) that it may name; null: all."""
    tools: tuple[str, ...] | None = None
    """Entries of `tools.defined` that its programs may call in the cluster; null: all."""


class TracingConfig(Section):
    """Traces of programs, by OpenTelemetry: one for each program, with spans for turns, queueing, holds and tools."""

    otlp_endpoint: str | None = Field(None, pattern=r"^https?://")
    """The whole URL of an OTLP/HTTP receiver, such as http://collector:4318/v1/traces. null: nothing is traced. Headers
    for it are read from OTEL_EXPORTER_OTLP_HEADERS."""
    sample_ratio: float = Field(1.0, ge=0, le=1)
    """The fraction of programs that is traced. Turns that come with a `traceparent` follow its sampling flag."""


class LogsConfig(Section):
    """Logs of the cluster's processes."""

    format: Literal["text", "json"] = "text"
    """`json`: one object a line, with the ids of the program, the turn's request and the model where there are any."""


class PredictorConfig(Section):
    """Predictions of turns and pauses, for what clients do not say."""

    mode: Literal["none", "statistics", "service"] = "statistics"
    """`statistics`: each ingress counts what it sees and predicts by itself (half a millisecond a turn); `service`:
    separate processes, with a trained model if there is a bundle; `none`: no predictions, as always with
    `http.data_plane: direct`."""
    bundle: str | None = Field(None, min_length=1)
    """Directory that `caesura predictor train` wrote, where every process of the cluster finds it; null: only what is
    learnt while serving. `statistics` uses only the statistics in it."""
    deadline_s: float = Field(0.005, gt=0, le=1)
    """An ingress waits at most this long for the service; then it uses statistics."""
    replicas: int = Field(1, ge=1, le=64)
    """Processes of the service."""
    cpus: float = Field(0.1, gt=0)
    """Ray CPUs that each reserves."""
    sync_interval_s: float = Field(5.0, gt=0)
    """How often what was learnt is written to the store, and read from it."""

    @model_validator(mode="after")
    def _bundle_is_served(self) -> Self:
        if self.bundle is not None and self.mode == "none":
            raise ValueError("a bundle is of no use with `mode: none`; choose `statistics` or `service`")
        return self
