"""The section of the configuration on forecasts."""

from typing import Literal, Self

from pydantic import Field, model_validator

from cluster.config_section import Section


class PredictorConfig(Section):
    """What forecasts turns and pauses, for what clients do not say."""

    mode: Literal["none", "statistics", "service"] = "statistics"
    """`statistics`: each ingress counts what it sees and forecasts by itself (half a millisecond a turn); `service`:
    processes of their own, with a trained model if there is a bundle; `none`: each replica goes by its own means, as
    always with `http.data_plane: direct`."""
    bundle: str | None = Field(None, min_length=1)
    """Directory that `caesura predictor train` wrote, where every process of the cluster finds it; null: only what is
    learnt while serving. `statistics` takes from it the statistics alone."""
    deadline_s: float = Field(0.005, gt=0, le=1)
    """An ingress waits no longer than this for the service; then it goes by statistics."""
    replicas: int = Field(1, ge=1, le=64)
    """Processes of the service."""
    cpus: float = Field(0.1, gt=0)
    """Ray CPUs that each reserves."""
    share_s: float = Field(5.0, gt=0)
    """How often what was learnt is written to the store, and read from it."""

    @model_validator(mode="after")
    def _bundle_is_served(self) -> Self:
        if self.bundle is not None and self.mode == "none":
            raise ValueError("a bundle is of no use with `mode: none`; choose `statistics` or `service`")
        return self
