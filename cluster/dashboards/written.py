"""YAML as a person would write it: expressions of several lines as blocks."""

from typing import Any

import yaml

HEADER = "# Written by `caesura dashboards render`; change cluster/dashboards/ instead.\n"


class _Dumper(yaml.SafeDumper):
    """Writes strings of several lines as literal blocks."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


def as_yaml(data: Any) -> str:
    """A file's text."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=10_000, default_flow_style=False)
    return HEADER + text
