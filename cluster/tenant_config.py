"""The configuration's sections on tenants, and on the keys that say who is one."""

from pydantic import Field

from cluster.config_section import Section as _Section
from cluster.slo_config import SloConfig


class KeysConfig(_Section):
    """API keys. Without a file everybody may do everything: only where nobody else can reach the port."""

    file: str | None = Field(None, min_length=1)
    """A YAML or JSON file of keys, such as a mounted secret; `caesura keys new` makes entries for it."""
    reload_s: float = Field(2.0, gt=0)
    """How often it is looked at for changes."""


class TenantConfig(_Section):
    """What is different for a tenant. Limits are of all ingresses together, in equal parts. null: no limit."""

    slo: SloConfig = Field(default_factory=SloConfig)
    """Bounds that count for this tenant, on every model; those that are not said are the model's."""
    weight: float = Field(1.0, gt=0, le=1000)
    """Its part of the room where programs wait to be admitted, beside the other tenants'."""
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
