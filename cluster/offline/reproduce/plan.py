"""The evaluation of a paper as data: its figures, their runs, and the published numbers.

`papers/NAME.yaml` has one document for each paper. A figure has settings of the simulator, systems (policies by the
paper's names), loads, measures, and rows. A row is one published number and how ours is computed from the measures:

    value      the measure of ``system`` at ``load``
    ratio      the measure of ``system`` divided by that of ``against``, at ``load``
    less       percent by which the measure of ``system`` is below that of ``against``, at ``load``
    mean_ratio the mean of the ratios at all loads
    least      the smallest of the ratios at all loads
    sustained  the load at which ``system`` reaches a level of the measure, divided by that of ``against``: the largest
               over all levels that both reach
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.core.errors import ConfigError

PAPERS = ("infercept", "lamps", "mars", "augserve", "continuum")
FOLDER = "cluster.offline.reproduce"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class System(_Strict):
    """A system that the paper compares: a policy of ours, with the settings that make it that system."""

    policy: str
    """As for `caesura simulate --policies`."""
    parameters: dict[str, Any] = {}
    """Parameters of the policy that differ from their defaults."""
    settings: dict[str, Any] = {}
    """Settings that differ from the figure's."""


class Load(_Strict):
    """One point of the load."""

    rate: float = Field(gt=0)
    """Arrivals of programs per second, over all replicas."""
    settings: dict[str, Any] = {}
    """Settings that differ from the figure's."""
    quick: bool = False
    """Whether ``--quick`` runs it."""


class Row(_Strict):
    """A published number."""

    what: str
    """A label, with the place in the paper if it is another than the figure's."""
    published: float
    measure: str
    kind: Literal["value", "ratio", "mean_ratio", "least", "less", "sustained"] = "value"
    system: str
    against: str | None = None
    load: str | None = None
    """Name of the load; None: all loads. The largest number counts for `ratio` and `less`."""
    headline: bool = False
    """Whether the paper names it in its abstract or introduction."""


class Factor(_Strict):
    """A suspected cause of a difference: settings and parameters with which the figure is run again."""

    what: str
    settings: dict[str, Any] = {}
    systems: list[str] | None = None
    """The systems whose settings change; None: all."""
    parameters: dict[str, dict[str, Any]] = {}
    """By system, the parameters of its policy that change."""

    def applies_to(self, system: str) -> bool:
        """Return whether the settings of a system change."""
        return self.systems is None or system in self.systems

    def changes(self, system: str) -> bool:
        """Return whether anything of a system changes."""
        return system in self.parameters or (bool(self.settings) and self.applies_to(system))


class Figure(_Strict):
    """One table or figure of the paper."""

    title: str
    settings: dict[str, Any]
    """Fields of `SimulationSettings` and `Shaping`, ``trace`` without its folder, and ``added_step_s``."""
    systems: dict[str, System]
    loads: dict[str, Load]
    measures: dict[str, dict[str, Any] | str]
    rows: list[Row]
    factors: dict[str, Factor] = {}
    missing: list[str] = []
    """Published numbers of the figure that are not reproduced, with the reason."""


class Paper(_Strict):
    """The evaluation of one paper."""

    title: str
    figures: dict[str, Figure]
    missing: list[str] = []
    """What of the evaluation is not here, with the reason."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run of the simulator: a system of a figure at one load, with one seed and at most one changed factor."""

    figure: str
    system: str
    load: str
    seed: int
    factor: str = ""
    """Name of the factor; empty for the figure's own settings."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)
    """All settings, merged."""


def paper_of(name: str) -> Paper:
    """Load the plan of a paper.

    Raises:
        ConfigError: there is no such paper.
    """
    if name not in PAPERS:
        raise ConfigError(f"PAPER: {name!r} is none of {', '.join(PAPERS)}")
    text = (files(FOLDER) / "papers" / f"{name}.yaml").read_text(encoding="utf-8")
    try:
        paper = Paper.model_validate(yaml.safe_load(text))
    except ValidationError as error:
        raise ConfigError(f"{name}.yaml: {error}") from None
    for figure, plan in paper.figures.items():
        check(f"{name}.yaml: {figure}", plan)
    return paper


def check(where: str, figure: Figure) -> None:
    """Raise ConfigError if a row names what the figure lacks. ``where`` begins the message."""
    for row in figure.rows:
        named: list[tuple[str, str | None, Mapping[str, Any]]] = [
            ("measure", row.measure, figure.measures),
            ("system", row.system, figure.systems),
            ("against", row.against, figure.systems),
            ("load", row.load, figure.loads),
        ]
        for key, value, known in named:
            if value is not None and value not in known:
                raise ConfigError(f"{where}: {row.what}: {key}: there is no {value!r}")
        if (row.kind == "value") != (row.against is None) or (row.kind == "value" and row.load is None):
            raise ConfigError(f"{where}: {row.what}: {row.kind} needs or lacks `against` or `load`")
    for name, factor in figure.factors.items():
        if unknown := (factor.parameters.keys() | {*(factor.systems or ())}) - figure.systems.keys():
            raise ConfigError(f"{where}: factor {name}: there is no system {', '.join(sorted(unknown))}")


def jobs_of(
    figures: Mapping[str, Figure], seeds: tuple[int, ...], *, quick: bool, factors: Container[str]
) -> list[Job]:
    """Return the runs of the figures: as they are, then with each of ``factors``, where it changes a system.

    ``quick`` leaves out loads that are not marked for it.
    """
    jobs = []
    for name, figure in figures.items():
        variants = {key: one for key, one in figure.factors.items() if key in factors}
        for factor, changed in ({"": Factor(what="")} | variants).items():
            for load_name, load in figure.loads.items():
                if quick and not load.quick:
                    continue
                for system_name, system in figure.systems.items():
                    if factor and not changed.changes(system_name):
                        continue
                    parameters = system.parameters | changed.parameters.get(system_name, {})
                    own = {"policy": system.policy, "parameters": parameters, "rate": load.rate}
                    other = changed.settings if changed.applies_to(system_name) else {}
                    settings = figure.settings | load.settings | system.settings | other | own
                    jobs += [Job(name, system_name, load_name, seed, factor, settings) for seed in seeds]
    return jobs
