"""The tools of the configuration: what is wrong is told by its path, and every kind there is can be configured."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.config.loader import config_schema, load_config
from cluster.config.tools import CommandTool, ToolModel, ToolsConfig
from cluster.core.errors import ConfigError
from cluster.core.registry import TOOL_KINDS
from cluster.core.tools import SEPARATOR, is_taken, server_tool_name
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
        ("{kind: command, argv: ['{c}', x]}", "tools.defined.t: argv.0: an argument of the call cannot be the command"),
        (
            "{kind: command, argv: [bash, -c, 'grep {x} /data']}",
            "tools.defined.t: argv.2: an argument of the call would",
        ),
        (
            "{kind: command, argv: [env, /bin/sh, -e, '-c{x}']}",
            "tools.defined.t: argv.3: an argument of the call would",
        ),
        ("{kind: command, argv: [python3, -I, -c, '{x}']}", "tools.defined.t: argv.3: an argument of the call would"),
        ("{kind: command, argv: [node, '--eval={x}']}", "tools.defined.t: argv.1: an argument of the call would"),
    ],
)
def test_what_is_wrong_is_told_by_its_path(tmp_path: Path, tool: str, says: str) -> None:
    assert f"c.yaml: {says}" in complaints(tmp_path, tool)


@pytest.mark.parametrize(
    "argv",
    [
        ["bash", "-c", 'grep "$1" /data', "_", "{x}"],
        ["python3", "tool.py", "-c", "{x}"],
        ["git", "-c", "{x}"],
        ["tar", "-ce", "{x}"],
    ],
)
def test_an_argument_beside_code_or_of_another_command_is_data(argv: list[str]) -> None:
    assert CommandTool(kind="command", argv=argv).argv == argv


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


def test_no_tool_has_a_name_that_a_servers_tool_could_have() -> None:
    server, tool = {"kind": "mcp", "command": ["serve"]}, {"kind": "command", "argv": ["true"]}
    ToolsConfig.model_validate({"defined": {"files": server, "files_read": tool, "a__b": tool}})
    with pytest.raises(
        ValidationError, match="files__read: the name could be that of a tool of the MCP server 'files'"
    ):
        ToolsConfig.model_validate({"defined": {"files": server, "files__read": tool}})


NAMES = st.text("a_", min_size=1, max_size=6)


@settings(max_examples=2000)
@given(
    tools=st.dictionaries(NAMES, st.booleans(), max_size=3), labels=st.sets(NAMES, max_size=3), offered=st.sets(NAMES)
)
def test_no_two_tools_have_one_name_whatever_servers_and_tools_are_called(
    tools: dict[str, bool], labels: set[str], offered: set[str]
) -> None:
    """Of the operator's tools and servers, and of the servers of a request that are accepted beside them."""
    kinds = {True: {"kind": "mcp", "command": ["serve"]}, False: {"kind": "command", "argv": ["true"]}}
    try:
        config = ToolsConfig.model_validate({"defined": {name: kinds[server] for name, server in tools.items()}})
    except ValidationError:
        assume(False)
        raise
    accepted = [label for label in labels if SEPARATOR not in label and not label.endswith("_")]
    accepted = [label for label in accepted if not is_taken(label, config.defined)]
    servers = [name for name, server in tools.items() if server] + accepted
    names = [name for name, server in tools.items() if not server]
    names += [server_tool_name(server, tool) for server in servers for tool in offered]
    assert len(names) == len(set(names)), names


def test_the_name_of_an_operators_server_ends_with_no_separator() -> None:
    with pytest.raises(ValidationError, match=r"defined\.a_: the name of an MCP server must not end with '_'"):
        ToolsConfig.model_validate({"defined": {"a_": {"kind": "mcp", "command": ["serve"]}}})
