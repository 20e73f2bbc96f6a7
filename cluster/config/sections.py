"""Sections of the configuration that depend on no other section: SLOs, API keys, tenants, traces, logs, predictions."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from cluster.core.program import MAX_ID_LENGTH
from cluster.core.slo import Slo

TenantName = Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""A tenant's name. It has no slash, since that ends the tenant in a program's key, and no character that has to be
quoted in a label of metrics."""


class Section(BaseModel):
    """A frozen part of the configuration that rejects unknown keys and infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_as_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads `no` and `off` as false, which pydantic would convert to 0. Nobody means a port or a limit of 0 so.
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("must not be true or false")
        return value


class SloConfig(Section):
    """Bounds on latencies. A turn that meets all of them counts as good. null: this bound does not apply."""

    ttft_s: float | None = Field(1.0, gt=0)
    """Seconds from the intended arrival to the first token."""
    tpot_s: float | None = Field(None, gt=0)
    """Mean seconds between tokens after the first."""
    e2e_s: float | None = Field(None, gt=0)
    """Seconds from the intended arrival to the last token."""
    normalized_latency_s: float | None = Field(None, gt=0)
    """Seconds per generated token: the time from the intended arrival to the last token, divided by the tokens
    generated. For a program it is the time without tools, divided by the tokens of all turns."""
    slowdown: float | None = Field(None, ge=1)
    """Bound on the first token of a turn whose prompt takes long: so many times the seconds that the prompt's new
    tokens take alone on the replica, where this is more than `ttft_s`. Scheduling and the metrics of good turns use
    it."""

    @property
    def bounds(self) -> Slo:
        """The bounds as an `Slo`, which judges records."""
        return Slo(self.ttft_s, self.tpot_s, self.e2e_s, self.normalized_latency_s, self.slowdown)

    def over(self, wider: "SloConfig") -> "SloConfig":
        """Return these bounds, completed with those of ``wider`` where none is set. A bound of null counts as set."""
        return SloConfig(**wider.model_dump() | self.model_dump(exclude_unset=True))


class AuthConfig(Section):
    """API keys. Without a file, every client may do everything. Run it so only where no one else can reach the port."""

    file: str | None = Field(None, min_length=1)
    """A YAML or JSON file of keys, such as a mounted secret. `caesura keys new` makes entries for it. A relative path
    in a configuration file is relative to the folder of that file. null: no keys are needed."""
    reload_s: float = Field(2.0, gt=0)
    """Seconds between two checks of the file for changes. A removed key works for at most about this long."""


class TenantConfig(Section):
    """Settings of one tenant. Each limit is divided equally among the ingresses. null: no limit."""

    slo: SloConfig = Field(default_factory=SloConfig)
    """SLO bounds for this tenant, on every model. A bound that is not set here is the model's."""
    weight: float = Field(1.0, gt=0, le=1000)
    """The tenant's weight when programs wait for admission. While both have programs waiting, a tenant with weight 2
    gets twice the admitted work of a tenant with weight 1."""
    requests_per_s: float | None = Field(None, gt=0)
    """Requests per second. Only requests that make work for a replica count. Further requests get 429."""
    burst: int = Field(32, ge=1)
    """Size of the token bucket of `requests_per_s`: the number of requests that may arrive at once after an idle
    time."""
    max_concurrent: int | None = Field(None, ge=1)
    """Maximum number of requests in flight. Only requests that make work for a replica count. Further requests get
    429."""
    max_programs: int | None = Field(None, ge=1)
    """Maximum number of this tenant's programs whose loop runs in the cluster at the same time. Further ones get
    429."""
    models: tuple[str, ...] | None = None
    """Models, adapters (`ID:NAME`) and classes (`auto:NAME`) that the tenant may use; null: all."""
    tools: tuple[str, ...] | None = None
    """Entries of `tools.defined` that the tenant's programs may call in the cluster; null: all."""


class TracingConfig(Section):
    """OpenTelemetry traces: one trace for each program, with spans for turns, queueing, holds and tools."""

    otlp_endpoint: str | None = Field(None, pattern=r"^https?://")
    """The complete URL of an OTLP/HTTP receiver, such as http://collector:4318/v1/traces. null: nothing is traced. Its
    headers are read from OTEL_EXPORTER_OTLP_HEADERS."""
    sample_ratio: float = Field(1.0, ge=0, le=1)
    """The fraction of programs that is traced. A turn with a `traceparent` header follows the header's sampling
    flag."""


class LogsConfig(Section):
    """Logs of the cluster's processes."""

    format: Literal["text", "json"] = "text"
    """Format of the log. `text` writes lines for people. `json` writes one object a line, with the ids of the program,
    the turn's request and the model where they are known."""


class BatchesConfig(Section):
    """Batches (`/v1/batches`) and the files that they read and write (`/v1/files`). Redis has the files, compressed."""

    max_concurrent: int = Field(64, ge=1, le=4096)
    """Maximum number of lines of batches in flight in one ingress. A tenant with fewer than two may start them all the
    same. Fewer are in flight while replicas refuse batch work. Increase it if the replicas are idle while a batch is in
    progress."""
    max_file_bytes: int = Field(64 << 20, ge=1024)
    """Maximum size of a file in bytes. Larger files get 413. JSON lines take about a fifth of their size in Redis."""
    max_stored_bytes: int = Field(256 << 20, ge=1024)
    """Maximum size in bytes of all files of a tenant and of the results of its batches in progress. At this size
    uploads get 400, and the tenant's batches pause until files are deleted. The tenant's conversations may have as many
    bytes, which count by themselves and are not compressed in Redis."""
    retention_s: float = Field(7 * 24 * 3600.0, ge=3600, le=366 * 24 * 3600)
    """Seconds for which a file is kept, unless its upload says another time, and for which an ended batch is listed."""


class PredictorConfig(Section):
    """Predictions of turns and pauses. They are used where a client gives no hint."""

    mode: Literal["none", "statistics", "service"] = "statistics"
    """Where predictions are made. `statistics`: each ingress predicts by itself, from statistics, which takes about
    half a millisecond a turn. `service`: separate processes predict, with a trained model if there is a bundle. `none`:
    there are no predictions."""
    bundle: str | None = Field(None, min_length=1)
    """Directory that `caesura predictor train` wrote. Every process of the cluster must find it under this path. A
    relative path in a configuration file is relative to the folder of that file. null: predictions use only what is
    learnt while serving. With the mode `statistics`, only the bundle's statistics are used."""
    deadline_s: float = Field(0.005, gt=0, le=1)
    """Seconds that an ingress waits for the service. After that it predicts from its own statistics."""
    replicas: int = Field(1, ge=1, le=64)
    """Number of processes of the service."""
    cpus: float = Field(0.1, gt=0)
    """Ray CPUs that each process of the service reserves."""
    sync_interval_s: float = Field(5.0, gt=0)
    """Seconds between two exchanges of learnt statistics with the store. A lower value spreads them sooner, and makes
    more calls of Redis."""

    @model_validator(mode="after")
    def _bundle_is_served(self) -> Self:
        if self.bundle is not None and self.mode == "none":
            raise ValueError("a bundle is of no use with `mode: none`; choose `statistics` or `service`")
        return self
