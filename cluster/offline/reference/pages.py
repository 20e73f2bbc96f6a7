"""Generates the reference pages of the documentation from the program: commands, metrics and configuration.

The pages are Markdown for both GitHub and mkdocs.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from typer import Context
from typer.cli import get_docs_for_click
from typer.core import TyperGroup

from cluster.observing.catalogue import Kind, Metric
from cluster.offline.dashboards.rules import alerts_on

NOTE = "<!-- Written by `make docs`; change the code that it describes instead. -->"


def page(title: str, *blocks: str) -> str:
    """Return a page, with a note that it is generated."""
    return "\n\n".join((f"# {title}", NOTE, *(block for block in blocks if block))) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, whose cells are already Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cell(text: str) -> str:
    """Return a text on one line, with bars escaped that would end a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(value: str) -> str:
    """Return a text as inline code. Quotes are not changed."""
    return f"`{value}`"


def anchor(heading: str) -> str:
    """Return the fragment of a heading in GitHub and mkdocs. It may have letters, digits, dots, colons and spaces."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in "_- ")
    return "#" + kept.replace(" ", "-")


CLI_INTRODUCTION = """\
`make setup` puts `caesura` into `.venv/bin`. Exit status 2 means a configuration, a trace or a flag
that cannot be used; 1, that the command failed."""


def cli_page(root: TyperGroup, context: Context) -> str:
    """Return the reference of the command line, as `typer utils docs` writes it.

    Args:
        root: the root command.
        context: the context of any call, which is needed to show types.
    """
    _, heading, commands = get_docs_for_click(obj=root, ctx=context, name="caesura").partition("## `caesura ")
    return page("Command line reference", CLI_INTRODUCTION, heading + commands.rstrip())


METRICS_INTRODUCTION = """\
Every metric that Caesura exports, with its name in Prometheus. `deploy/prometheus` has recording rules,
alerts ([runbooks](../runbooks.md)) and scrape configurations, which remove Ray's prefix `ray_`. `deploy/grafana` has
the dashboards. Label values are enums or names from the configuration, never ids. A tenant that the configuration does
not name is `other`. Ray adds the labels `ReplicaId`, `NodeAddress` and `WorkerId`. vLLM's own metrics (`vllm:*`) are
exported, too."""

BUCKETS = "## Buckets\n\nUpper bounds of the histograms' buckets, without +Inf."


def metrics_page(catalogue: Iterable[Metric]) -> str:
    """Return the reference of the metrics."""
    every = tuple(catalogue)
    histograms = (one for one in every if one.kind is Kind.HISTOGRAM)
    bounds = ((code(one.exported), ", ".join(f"{bound:g}" for bound in one.buckets)) for one in histograms)
    return page(
        "Metrics reference",
        METRICS_INTRODUCTION,
        table(("metric", "type", "unit", "labels", "meaning", "dashboard", "alerts"), map(_metric_row, every)),
        BUCKETS,
        table(("metric", "buckets"), bounds),
    )


def _metric_row(metric: Metric) -> tuple[str, ...]:
    labels = ", ".join(map(code, metric.labels))
    alerts = ", ".join(f"[{name}](../runbooks.md#{name.lower()})" for name in alerts_on(metric))
    dashboard = metric.dashboard.name.lower()
    return code(metric.exported), metric.kind.value, metric.unit, labels, metric.help, dashboard, alerts


Schema = Mapping[str, Any]

CONFIGURATION_INTRODUCTION = """\
Every key of the YAML file that `--config` names. Unknown keys are refused. Each key can also be set
by an environment variable, `CAESURA__HTTP__PORT=9000`, or by a flag, `--set http.port=9000`; flags win over variables,
and variables over the file. `caesura config show` prints the configuration in effect, `caesura config check` finds
mistakes, and `caesura config schema` prints the JSON Schema that this page is made of. Units are in the names: `_s`
seconds, `_tokens`, `_bytes`."""

NAME = "NAME"
"""Placeholder for the name that the operator gives to an entry."""

HEAD = ("key", "value", "default", "what it says")

BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))


def schema_page(schema: Schema) -> str:
    """Return the reference of the configuration.

    Args:
        schema: the result of `cluster.config.loader.config_schema`.
    """
    return page("Configuration reference", CONFIGURATION_INTRODUCTION, *_Reference(schema).blocks())


class _Reference:
    """Walks the schema. A section that occurs several times is described at its first place."""

    def __init__(self, schema: Schema) -> None:
        self._root = schema
        self._places: dict[str, str] = {}

    def blocks(self) -> Iterator[str]:
        """Yield the blocks of the page in the order of the configuration file."""
        leaves = {key: value for key, value in self._root["properties"].items() if not self._leads_on(value)}
        yield "## Top level"
        yield self._table(leaves)
        for key, value in self._root["properties"].items():
            if key not in leaves:
                yield from self._place(key, value, depth=2)

    def _place(self, path: str, value: Schema, depth: int) -> Iterator[str]:
        """Yield the blocks of a path, which is a section or has entries that the operator names."""
        one = self._resolved(value)
        entries = _entries(one)
        if entries is not None:
            several = one.get("type") == "array"
            yield from self._of(path if several else f"{path}.{NAME}", entries, depth, value.get("description", ""))
        else:
            yield from self._of(path, value, depth, value.get("description", ""))

    def _of(self, path: str, value: Schema, depth: int, intro: str) -> Iterator[str]:
        deeper = _entries(value)
        if deeper is not None:
            yield from self._of(f"{path}[]", deeper, depth, intro)
            return
        yield f"{'#' * depth} {path}"
        if intro:
            yield _sentence(intro)
        kinds = [self._resolved(kind) for kind in value.get("oneOf", ())]
        if kinds:
            yield from self._kinds(path, kinds, depth + 1)
        else:
            yield from self._section(path, value, depth, said=intro)

    def _section(self, path: str, value: Schema, depth: int, said: str = "") -> Iterator[str]:
        if "$ref" in value:
            self._places.setdefault(value["$ref"], path)
        section = self._resolved(value)
        description = section.get("description", "")
        if description and description != said:
            yield _sentence(description)
        yield self._table(section["properties"])
        for key, inner in section["properties"].items():
            optional = self._section_in(inner) if "anyOf" in inner else None
            if self._leads_on(inner) and inner.get("$ref") not in self._places:
                yield from self._place(f"{path}.{key}", inner, depth + 1)
            elif optional is not None and optional.get("$ref") not in self._places:
                yield from self._of(f"{path}.{key}", optional, depth + 1, inner.get("description", ""))
        yield from self._parameters(path, section, depth + 1)

    def _parameters(self, path: str, section: Schema, depth: int) -> Iterator[str]:
        """Yield the parameters of each plug-in that the section's `name` may select."""
        for choice in section.get("allOf", ()):
            name = choice["if"]["properties"]["name"]["const"]
            parameters = self._resolved(choice["then"]["properties"]["parameters"])
            yield f"{'#' * depth} {path}.parameters: {name}"
            yield _sentence(parameters.get("description", ""))
            if parameters.get("properties"):
                yield self._table(parameters["properties"])

    def _kinds(self, path: str, kinds: list[Schema], depth: int) -> Iterator[str]:
        """Yield sections that differ by their `kind`, with their shared keys first."""
        first, *others = (kind["properties"] for kind in kinds)
        shared = {key for key in first if all(first[key] == other.get(key) for other in others)}
        yield "Of every kind:"
        yield self._table({key: first[key] for key in first if key in shared})
        for kind in kinds:
            yield f"{'#' * depth} {path}: {kind['properties']['kind']['const']}"
            yield _sentence(kind.get("description", ""))
            yield self._table({key: value for key, value in kind["properties"].items() if key not in shared})
            for key, inner in kind["properties"].items():
                if key not in shared and self._section_in(inner) is not None:
                    yield from self._of(f"{path}.{key}", self._section_in(inner) or {}, depth + 1, "")

    def _table(self, properties: Schema) -> str:
        rows = (
            (code(key), self._value(value), self._default(value), value.get("description", ""))
            for key, value in properties.items()
        )
        return table(HEAD, rows)

    def _default(self, value: Schema) -> str:
        return code(json.dumps(value["default"])) if "default" in value else ""

    def _value(self, value: Schema) -> str:
        if "$ref" in value and value["$ref"] in self._places:
            place = self._places[value["$ref"]]
            return f"a section, as [{place}]({anchor(place)})"
        one = self._resolved(value)
        if "const" in one:
            return code(str(one["const"]))
        if "enum" in one:
            return ", ".join(code(str(choice)) for choice in one["enum"])
        if "anyOf" in one or "oneOf" in one:
            return " or ".join(dict.fromkeys(self._value(choice) for choice in one.get("anyOf") or one["oneOf"]))
        if one.get("type") == "array":
            return f"list: {self._value(one.get('items', {}))}"
        if one.get("type") == "object":
            return "a section" if "properties" in one else "a mapping"
        bounds = ", ".join(f"{sign} {_number(one[word])}" for word, sign in BOUNDS if word in one)
        return f"{one.get('type', 'anything')} {bounds}".strip()

    def _section_in(self, value: Schema) -> Schema | None:
        """Return the section that a value is, also if it may be null; None if it is no section."""
        choices = [value, *value.get("anyOf", ())]
        return next((choice for choice in choices if "properties" in self._resolved(choice)), None)

    def _leads_on(self, value: Schema) -> bool:
        one = self._resolved(value)
        entries = _entries(one)
        return "properties" in one or (entries is not None and self._leads_on(entries)) or "oneOf" in one

    def _resolved(self, value: Schema) -> Schema:
        if "$ref" not in value:
            return value
        definition: Schema = self._root["$defs"][value["$ref"].rpartition("/")[2]]
        return definition


def _entries(one: Schema) -> Schema | None:
    """Return the schema of the entries of a mapping or a list; None if it is neither or allows any entries."""
    patterns = one.get("patternProperties", {})
    found = one.get("items") or one.get("additionalProperties") or next(iter(patterns.values()), None)
    return found if isinstance(found, Mapping) else None


def _number(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def _sentence(text: str) -> str:
    return " ".join(text.split())
