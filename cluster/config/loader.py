"""Loads the configuration from a YAML file, the environment and flags, and writes it as YAML or as a JSON Schema.

The environment overrides the file, and flags override both. Every error message has the form ``SOURCE: key.path:
message (got VALUE, line N)``, where SOURCE is the file, the variable or the flag. All errors are reported together, one
a line.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import ErrorDetails

from cluster.config.models import AdapterConfig, ModelWeights
from cluster.config.schema import CaesuraConfig, PolicyConfig, RouterConfig
from cluster.config.tools import ToolModel
from cluster.core.errors import ConfigError
from cluster.core.registry import POLICIES, ROUTER_PARAMETERS, ROUTERS, read_cost_model

VARIABLE_PREFIX = "CAESURA__"
"""Prefix of environment variables that override a key. CAESURA__HTTP__PORT sets http.port. Case does not matter."""

BUILT_IN = "built-in configuration"
"""The source that messages name for default values."""

MAX_SHOWN = 80
"""Maximum length of an invalid value in an error message (characters)."""

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"

KeyPath = tuple[str, ...]

SECRET_SECTIONS = frozenset({"headers", "environment"})
"""Sections whose values are never shown, as they may contain secrets: headers that a tool sends, and the environment
of a command."""

HIDDEN = "***"
_USER = re.compile(r"://[^/\s'\"]*@")

TOOLS: KeyPath = ("tools", "defined")

RENAMED: dict[str, str | None] = {
    "store": "redis",
    "control": "limits",
    "control.hold_limit_s": "limits.max_pin_s",
    "control.idle_program_s": "limits.program_ttl_s",
    "limits.hold_limit_s": "limits.max_pin_s",
    "limits.idle_program_s": "limits.program_ttl_s",
    "keys": "auth",
    "classes": "model_routing",
    "replicas.host_bytes": "replicas.cpu_offload_bytes",
    "models.*.replicas.host_bytes": "models.*.replicas.cpu_offload_bytes",
    "predictor.share_s": "predictor.sync_interval_s",
    **dict.fromkeys(
        f"policy.parameters.{name}"
        for name in (
            "hopeless_share",
            "hopeless_room",
            "newcomers_room",
            "step_saturations",
            "prompt_share",
            "hold_worth",
        )
    ),
    **dict.fromkeys(
        f"router.parameters.{name}"
        for name in ("empty_share", "aged_share", "tenant_spread", "ledger_snapshots", "guarded_working_set")
    ),
}
"""Old keys with their new names; None: the key was removed. It is looked up only for keys that are unknown."""


@dataclass(slots=True)
class _Layers:
    """The merged values of all sources, and the source of each."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def override(self, source: str, path: KeyPath, value: Any) -> None:
        if not all(path):
            raise ConfigError(f"{source}: names no key: a part of its path is empty")
        here = self.values
        for depth, key in enumerate(path[:-1], start=1):
            section = {} if here.get(key) is None else here[key]
            if not isinstance(section, dict):
                raise ConfigError(f"{source}: {'.'.join(path[:depth])}: is not a section (got {_shown(section)})")
            here[key] = here = dict(section)  # a YAML alias shares its section with others, which must not change
        here[path[-1]] = value
        self.overrides[path] = source

    def source_of(self, path: KeyPath) -> str:
        """Return the variable or flag that set the key or a section above it. Otherwise return the file if it has the
        key, or else a variable or flag that set a key below it, or else the file.
        """
        above = (self.overrides.get(path[:length]) for length in range(len(path), 0, -1))
        below = (source for key, source in self.overrides.items() if key[: len(path)] == path)
        default = self.source if path in self.lines else next(below, self.source)
        return next((source for source in above if source is not None), default)

    def complaint(self, path: KeyPath, message: str, got: str = "") -> str:
        source = self.source_of(path)
        line = f"line {self.lines[path]}" if source == self.source and path in self.lines else ""
        notes = ", ".join(note for note in (f"got {got}" if got else "", line) if note)
        return f"{source}: {'.'.join(path)}: {message}" + (f" ({notes})" if notes else "")


def load_config(
    path: Path | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, Any] | None = None,
) -> CaesuraConfig:
    """Read the configuration.

    Args:
        path: the YAML file; None: the defaults are used.
        environment: environment variables. Those that begin with ``CAESURA__`` override the file.
        overrides: values by dotted keys. They override the file and the environment.

    Raises:
        ConfigError: the configuration is invalid. The message has one line for each error.
    """
    layers = _Layers(BUILT_IN) if path is None else _read_file(path)
    for name in sorted(environment):
        if name.upper().startswith(VARIABLE_PREFIX):
            keys = tuple(name[len(VARIABLE_PREFIX) :].lower().split("__"))
            layers.override(name, keys, _parse_scalar(name, environment[name]))
    for dotted, value in (overrides or {}).items():
        layers.override(f"--set {dotted}", tuple(dotted.split(".")), value)
    # A section whose keys are all commented out is null in YAML, and gets the defaults.
    sections = CaesuraConfig.model_fields.keys()
    said = {key: value for key, value in layers.values.items() if value is not None or key not in sections}
    try:
        config = CaesuraConfig.model_validate(said)
    except ValidationError as error:
        raise ConfigError("\n".join(_complaints(error, layers))) from None
    return _with_mounts(_with_paths(config, layers, path), layers, path)


def read_config(file: Path | None, assignments: list[str] | None) -> CaesuraConfig:
    """Read the configuration of a command from the file, then from CAESURA__ variables, then from --set.

    Raises:
        ConfigError: a value is invalid; the message has one line for each error.
    """
    return load_config(file, os.environ, dict(parse_assignment(text) for text in assignments or ()))


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse the ``key.path=value`` of a flag. The value is YAML.

    Raises:
        ConfigError: there is no ``=`` or no key, or the value is not YAML.
    """
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {text}: must be key.path=value")
    return key.strip(), _parse_scalar(f"--set {key.strip()}", value)


def dump_config(config: CaesuraConfig) -> str:
    """Return the configuration as YAML with all defaults, including those of the policy's and the router's
    parameters.
    """
    values = config.model_dump(mode="json")
    parameters = POLICIES.load(config.policy.name).model_validate(config.policy.parameters)
    values["policy"]["parameters"] = parameters.model_dump(mode="json")
    if (placement := config.placement) is not None:
        values["router"]["parameters"] = placement.model_dump(mode="json")
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the file. ``$defs`` has the parameters of each policy and router."""
    of_policies = {name: POLICIES.load(name) for name in POLICIES}
    of_routers = {name: ROUTER_PARAMETERS.load(name) for name in ROUTER_PARAMETERS}
    models = [CaesuraConfig, *dict.fromkeys((*of_policies.values(), *of_routers.values()))]
    references, schema = models_json_schema([(model, "validation") for model in models])
    definitions = schema["$defs"]
    root = definitions.pop(CaesuraConfig.__name__)
    for section, names, parameters in (
        (PolicyConfig, POLICIES, of_policies),
        (RouterConfig, ROUTERS, of_routers),
    ):
        described = definitions[section.__name__]
        described["properties"]["name"]["enum"] = list(names)
        default = section.model_fields["name"].default
        described["allOf"] = [
            {
                # Without "required" the condition also holds where the name is left out, that is, for the default.
                "if": {"properties": {"name": {"const": name}}, **({} if name == default else {"required": ["name"]})},
                "then": {"properties": {"parameters": references[model, "validation"]}},
            }
            for name, model in parameters.items()
        ]
    return {"$schema": SCHEMA_DIALECT, **root, "$defs": definitions}


class _Loader(yaml.SafeLoader):
    """A YAML loader of our own, since other libraries may have changed the shared one in this process."""


def _timestamp(loader: _Loader, node: yaml.ScalarNode) -> Any:
    return loader.construct_yaml_timestamp(node)


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _timestamp)


def _read_file(path: Path) -> _Layers:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    layers = _Layers(str(path))
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return layers
        repeated = list(_walk(node, (), layers.lines, set()))
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{path}: {where}not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if repeated:
        raise ConfigError("\n".join(f"{path}: {complaint}" for complaint in repeated))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values (got {_shown(values)})")
    layers.values = values
    return layers


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], seen: set[int]) -> Iterator[str]:
    """Record the line of every key, and yield an error message for each repeated key. An aliased node counts once."""
    if not isinstance(node, yaml.MappingNode) or id(node) in seen:
        return
    seen.add(id(node))
    here: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        whole = (*path, name)
        if name in here:
            yield f"{'.'.join(whole)}: stands twice (lines {here[name]} and {line})"
        here[name] = lines[whole] = line
        yield from _walk(value, whole, lines, seen)


def _parse_scalar(source: str, text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{source}: not a YAML value (got {_shown(text)})") from None


def _complaints(error: ValidationError, layers: _Layers, prefix: KeyPath = ()) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        # pydantic marks an error in a mapping's key itself with the step "[key]".
        path = _without_kind((*prefix, *(str(step) for step in detail["loc"] if step != "[key]")))
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ValidationError):
            yield from _complaints(cause, layers, path)
        elif detail["type"] == "extra_forbidden":
            message = _renamed(path, detail["input"]) or _unknown_key(path, layers.values)
            yield layers.complaint(path, message, _shown(detail["input"], path))
        else:
            own = detail["loc"][-1:] != ("[key]",) and detail["type"] != "missing"
            yield layers.complaint(path, _message(detail, cause), _shown(detail["input"], path) if own else "")


def _without_kind(path: KeyPath) -> KeyPath:
    # pydantic adds the value of a tool's `kind` to the path of an error in the tool.
    return path[:3] + path[4:] if path[:2] == TOOLS else path


def _message(detail: ErrorDetails, cause: object) -> str:
    if detail["type"] == "model_type":
        return "must be a section of keys and values"
    if cause is not None:
        return str(cause)
    return detail["msg"][:1].lower() + detail["msg"][1:]


def _renamed(path: KeyPath, value: Any) -> str | None:
    """Return a message with the new names of an old key and of the keys below it; None: no key is an old one."""
    found = []
    below = [(*path, str(key)) for key in value] if isinstance(value, dict) else []
    for old in (path, *below):
        for pattern, new in RENAMED.items():
            steps = pattern.split(".")
            if len(steps) == len(old) and all(step in ("*", part) for step, part in zip(steps, old, strict=True)):
                own = iter(part for step, part in zip(steps, old, strict=True) if step == "*")
                name = new and ".".join(next(own) if step == "*" else step for step in new.split("."))
                whole = "" if old == path else f"{'.'.join(old)} "
                found.append(f"{whole}is called {name} now" if name else f"{whole}is not a setting any more")
    return "; ".join(found) or None


def _unknown_key(path: KeyPath, values: Mapping[str, Any]) -> str:
    known = sorted(_known_keys(path[:-1], values))
    near = difflib.get_close_matches(path[-1], known, n=1)
    if near:
        return f"unknown key; did you mean {'.'.join((*path[:-1], near[0]))}?"
    return f"unknown key; there are: {', '.join(known)}" if known else "unknown key"


def _known_keys(section: KeyPath, values: Mapping[str, Any]) -> set[str]:
    if section[:2] == ("policy", "parameters"):
        name = values["policy"].get("name", PolicyConfig.model_fields["name"].default)
        model, section = POLICIES.load(name), section[2:]
    elif section[:2] == ("router", "parameters"):
        name = values["router"].get("name", RouterConfig.model_fields["name"].default)
        model, section = ROUTER_PARAMETERS.load(name), section[2:]
    elif section[:2] == TOOLS and len(section) > 2:
        kind = values["tools"]["defined"][section[2]].get("kind")
        model, section = next(model for model in get_args(ToolModel) if kind in _kinds(model)), section[3:]
    else:
        model = CaesuraConfig
    here: Any = model
    for key in section:
        if here is None:
            return set()
        if hasattr(here, "model_fields"):
            here = _section_or_group(here.model_fields[key].annotation)
        else:
            here = _section_or_group(get_args(here)[-1 if get_origin(here) is dict else 0])
    return set(getattr(here, "model_fields", ()))


def _section_or_group(annotation: Any) -> Any:
    """Return the section, mapping or sequence type of an annotation; None: it is of another type."""
    for kind in (annotation, *get_args(annotation)):
        if hasattr(kind, "model_fields") or get_origin(kind) in (dict, tuple):
            return kind
    return None


def _kinds(model: type[BaseModel]) -> tuple[str, ...]:
    return get_args(model.model_fields["kind"].annotation)


def _with_paths(config: CaesuraConfig, layers: _Layers, path: Path | None) -> CaesuraConfig:
    """Make the paths of sources and cost models absolute, and check that they exist."""

    def source(key: KeyPath, said: str) -> str:
        if not said.startswith(("/", ".", "~")):
            return said
        resolved = _resolved(said, key, layers, path)
        if not resolved.exists():
            raise ConfigError(layers.complaint(key, f"no such path: {resolved}", _shown(said)))
        return str(resolved)

    def costs(key: KeyPath, said: str | None) -> str | None:
        if said is None:
            return None
        resolved = str(_resolved(said, key, layers, path)) if said.endswith(".json") else said
        try:
            read_cost_model(resolved)
        except ConfigError as error:
            raise ConfigError(layers.complaint(key, str(error), _shown(said))) from None
        return resolved

    def adapters(key: KeyPath, model: ModelWeights) -> dict[str, AdapterConfig]:
        return {
            name: AdapterConfig(path=source((*key, "adapters", name, "path"), adapter.path))
            for name, adapter in model.adapters.items()
        }

    further = {
        name: model.model_copy(
            update={
                "source": source(("models", name, "source"), model.source),
                "adapters": adapters(("models", name), model),
                "cost_model": costs(("models", name, "cost_model"), model.cost_model),
            }
        )
        for name, model in config.models.items()
    }
    first = config.model.model_copy(
        update={
            "source": source(("model", "source"), config.model.source),
            "adapters": adapters(("model",), config.model),
        }
    )
    cost_model = costs(("cost_model",), config.cost_model)
    return config.model_copy(update={"model": first, "cost_model": cost_model, "models": further})


def _with_mounts(config: CaesuraConfig, layers: _Layers, path: Path | None) -> CaesuraConfig:
    """Make the paths of keys and bundles absolute. They need not exist on the machine that reads the configuration."""
    bundle, file = config.predictor.bundle, config.auth.file
    if bundle is not None:
        bundle = str(_absolute(bundle, ("predictor", "bundle"), layers, path))
    if file is not None:
        file = str(_absolute(file, ("auth", "file"), layers, path))
    predictor = config.predictor.model_copy(update={"bundle": bundle})
    auth = config.auth.model_copy(update={"file": file})
    return config.model_copy(update={"predictor": predictor, "auth": auth})


def _resolved(source: str, key: KeyPath, layers: _Layers, path: Path | None) -> Path:
    """Resolve a path and the links in it, see `_absolute`."""
    return _absolute(source, key, layers, path).resolve()


def _absolute(given: str, key: KeyPath, layers: _Layers, path: Path | None) -> Path:
    """Make a path absolute. In the file it is relative to the file's directory, elsewhere to the working directory.

    Links stay: Kubernetes updates a mounted secret by changing one.
    """
    in_file = path is not None and layers.source_of(key) == layers.source
    base = path.parent if path is not None and in_file else Path()
    try:
        return (base / Path(given).expanduser()).absolute()
    except RuntimeError as error:  # ~NAME, and nobody has this name
        raise ConfigError(layers.complaint(key, str(error), _shown(given))) from None


def _shown(value: Any, path: KeyPath = ()) -> str:
    """Return an invalid value for an error message, without passwords and tokens, and cut to `MAX_SHOWN`."""
    text = HIDDEN if SECRET_SECTIONS.intersection(path) else _USER.sub(f"://{HIDDEN}@", repr(_without_secrets(value)))
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: HIDDEN if key in SECRET_SECTIONS else _without_secrets(part) for key, part in value.items()}
    return [_without_secrets(part) for part in value] if isinstance(value, list) else value
