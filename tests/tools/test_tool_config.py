"""The tools of the configuration: what is wrong is told by its path, and every kind there is can be configured."""

from pathlib import Path
from typing import get_args

import pytest

from cluster.config_source import config_schema, load_config
from cluster.errors import ConfigError
from cluster.registry import TOOL_KINDS
from cluster.tool_config import ToolModel, ToolsConfig, owner_of
from tools_runtime.host import ToolHost


def complaints(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text("tools:\n  defined:\n    t: " + text)
    with pytest.raises(ConfigError) as error:
        load_config(path, {})
    return str(error.value).replace(str(path), "c.yaml")


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (
            "{kind: http, url: 'http://x/', metho: GET}",
            "tools.defined.t.metho: unknown key; did you mean tools.defined.t.method?",
        ),
        ("{kind: nope}", "tools.defined.t: must be a section with a kind, one of: python, http, command, mcp"),
        ("{entry: 'm:f'}", "tools.defined.t: must be a section with a kind"),
        ("{kind: python, entry: m}", "tools.defined.t.entry: string should match"),
        ("{kind: python, entry: 'm:f', deadline_s: no}", "tools.defined.t.deadline_s: must not be true or false"),
        ("{kind: http}", "tools.defined.t: needs either url or openapi"),
        ("{kind: http, url: 'http://{host}/'}", "tools.defined.t.url: string should match"),
        ("{kind: http, url: 'file:///etc/passwd'}", "tools.defined.t.url: string should match"),
        ("{kind: command}", "tools.defined.t: needs either argv or shell"),
        ("{kind: command, argv: [ls], shell: true}", "tools.defined.t: needs either argv or shell"),
        ("{kind: mcp}", "tools.defined.t: needs either command or url"),
    ],
)
def test_what_is_wrong_is_told_by_its_path(tmp_path: Path, tool: str, says: str) -> None:
    assert f"c.yaml: {says}" in complaints(tmp_path, tool)


def test_every_registered_kind_can_be_configured_and_loaded() -> None:
    kinds = {get_args(model.model_fields["kind"].annotation)[0] for model in get_args(ToolModel)}
    assert kinds == set(TOOL_KINDS)
    for kind in TOOL_KINDS:
        assert callable(TOOL_KINDS.load(kind).run)
    assert "ToolsConfig" in config_schema()["$defs"]


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ({"kind": "python", "entry": "no_such_module:f"}, "tools.defined.t.entry: ModuleNotFoundError"),
        ({"kind": "python", "entry": "json:nothing"}, "tools.defined.t.entry: AttributeError"),
        ({"kind": "python", "entry": "json:dumps", "isolation": "async"}, "a coroutine function needs isolation async"),
        ({"kind": "command", "argv": ["ls"], "parameters": {"type": "string"}}, "tools.defined.t.parameters"),
        ({"kind": "http", "url": "http://x/", "headers_from_environment": {"A": "NOT_SET"}}, "NOT_SET is not set"),
        ({"kind": "http", "openapi": {"document": "/no/such", "operation": "x"}}, "tools.defined.t.openapi.document"),
    ],
)
async def test_what_cannot_work_is_told_at_the_start(tool: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ToolHost(ToolsConfig.model_validate({"defined": {"t": tool}}))


def test_whose_tool_it_is() -> None:
    kinds = {"files": "mcp", "a__b": "mcp", "files__read": "http", "x": "python"}
    owners = {
        tool: owner_of(tool, kinds.get) for tool in ("files__list", "files__read", "a__b__c", "x", "files", "y__z")
    }
    assert owners == {
        "files__list": "files",
        "files__read": "files__read",
        "a__b__c": "a__b",
        "x": "x",
        "files": None,
        "y__z": None,
    }
