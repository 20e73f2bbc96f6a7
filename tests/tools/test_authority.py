"""Whose tool a call reaches: names are resolved once, and no name of a request stands for a tool of the operator."""

from collections.abc import Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.config.tools import ToolsConfig
from cluster.core.errors import BadRequest
from cluster.core.tools import Outcome, ToolCall, ToolId, ToolOffer, ToolSource, function_object, server_tool_name
from cluster.responses.offers import brought
from cluster.responses.request import read_request
from tests.tools.scripted import ManualTimers, settings
from tools_runtime.executor import Entry, ToolExecutor, ToolTable
from tools_runtime.kind import Invocation, KnownTool, ToolOutput
from tools_runtime.schemas import ArgumentCheck

MCP = {"kind": "mcp", "url": "https://example.com/mcp"}
PYTHON = {"kind": "python", "entry": "math:sin"}


class Server:
    """An MCP server that answers with whose it is, and with the tool that was called."""

    def __init__(self, whose: str, name: str, tools: Sequence[str]) -> None:
        self._whose, self._name = whose, name
        self._tools = {tool: self._known(tool) for tool in tools}

    async def open(self) -> None:
        """Nothing."""

    def _known(self, tool: str) -> KnownTool:
        called = server_tool_name(self._name, tool)
        offer = ToolOffer(called, function_object(called, None, None), here=True, server_tool=tool)
        return KnownTool(offer, ArgumentCheck({"type": "object"}))

    def tools(self) -> Sequence[KnownTool]:
        return tuple(self._tools.values())

    def unusable(self) -> Sequence[ToolOffer]:
        return ()

    async def tool(self, name: str) -> KnownTool | None:
        return self._tools.get(name)

    async def run(self, invocation: Invocation) -> ToolOutput:
        return ToolOutput(f"{self._whose} {self._name} {invocation.tool}")

    async def aclose(self) -> None:
        """Nothing."""


def table(servers: dict[str, list[str]], source: ToolSource, below: ToolTable | None = None) -> ToolTable:
    entries = [Entry.of(name, settings(), Server(source.value, name, tools), source) for name, tools in servers.items()]
    return ToolTable(entries, below)


# Names that are made of the separator's character, and of two others.
NAMES = st.lists(st.sampled_from(("a", "b", "_", "__")), min_size=1, max_size=4).map("".join)
SERVERS = st.dictionaries(NAMES, st.lists(NAMES, max_size=3, unique=True), max_size=3)


@given(SERVERS, SERVERS)
async def test_a_call_reaches_the_tool_that_was_resolved(
    operators: dict[str, list[str]], requests: dict[str, list[str]]
) -> None:
    """It holds for all names, also for those that are refused where a request names them."""
    below = table(operators, ToolSource.OPERATOR)
    both = table(requests, ToolSource.REQUEST, below)
    executor = ToolExecutor(below, ManualTimers())
    offers = [offer for entry in (*below.own, *both.own) for offer in entry.offers()]
    for number, offer in enumerate(offers):
        assert offer.tool is not None
        result = await executor.run(ToolCall(f"c{number}", offer.name, tool=offer.tool, consent="yes"), both)
        assert result.text == f"{offer.tool.source} {offer.tool.entry} {offer.tool.tool}"
    expected = {ToolId.of_operator(entry, tool) for entry, tools in operators.items() for tool in tools}
    expected |= {ToolId.of_request(entry, tool) for entry, tools in requests.items() for tool in tools}
    assert {offer.tool for offer in offers} == expected
    await executor.aclose()


@given(st.dictionaries(NAMES, st.booleans(), max_size=4), st.lists(NAMES, min_size=1, max_size=3), NAMES, NAMES)
@example({"a__b": False}, ["a"], "b", "x")
@example({"a": True}, ["a__b"], "c", "b__c")
@example({"a": True}, ["a_"], "b", "_b")
def test_no_accepted_label_makes_a_name_of_the_operators(
    entries: dict[str, bool], labels: list[str], theirs: str, operators: str
) -> None:
    """Models call tools by name: a tool of a request's server never has the name of another tool."""
    defined: dict[str, Any] = {name: MCP if is_server else PYTHON for name, is_server in entries.items()}
    try:
        ToolsConfig.model_validate({"defined": defined})
        tools = [{"type": "mcp", "server_label": label, "server_url": "https://example.com"} for label in labels]
        definitions = brought(read_request({"input": "hi", "tools": tools}), taken=defined).definitions
    except (ValidationError, BadRequest):
        return
    assert definitions
    names = [server_tool_name(label, theirs) for label in definitions]
    names += [server_tool_name(name, operators) if is_server else name for name, is_server in entries.items()]
    assert len(set(names)) == len(names)


async def test_a_refusal_names_only_tools_of_the_same_entry() -> None:
    below = table({"docs": ["read"], "payroll": ["dismiss"]}, ToolSource.OPERATOR)
    executor = ToolExecutor(below, ManualTimers())
    for number, tool in enumerate((ToolId.of_operator("docs", "raed"), ToolId.of_operator("nothing", "read"))):
        result = await executor.run(ToolCall(f"c{number}", "docs__raed", tool=tool))
        assert (result.outcome, "payroll" in result.text) == (Outcome.REFUSED, False)
        assert ("docs__read" in result.text) == (tool.entry == "docs")
    await executor.aclose()


async def test_a_request_without_such_a_tool_does_not_reach_the_operators() -> None:
    """The log of a run may name a server of a request that is no longer there."""
    below = table({"docs": ["read"]}, ToolSource.OPERATOR)
    executor = ToolExecutor(below, ManualTimers())
    for tools in (None, table({"other": ["read"]}, ToolSource.REQUEST, below)):
        result = await executor.run(ToolCall("c", "docs__read", tool=ToolId.of_request("docs", "read")), tools)
        assert result.outcome is Outcome.REFUSED
    await executor.aclose()


async def test_results_are_kept_by_tool_and_not_by_name() -> None:
    """Two tools of one name, with one key: each gets its own result."""
    below = table({"a": ["b__c"]}, ToolSource.OPERATOR)
    both = table({"a__b": ["c"]}, ToolSource.REQUEST, below)
    executor = ToolExecutor(below, ManualTimers())
    tools = (ToolId.of_operator("a", "b__c"), ToolId.of_request("a__b", "c"))
    calls = [
        ToolCall(f"{place}-{key}", "a__b__c", program="t/p", tool=tool, **{key: "once"})
        for place, tool in enumerate(tools)
        for key in ("consent", "idempotency_key")
    ]
    results = [await executor.run(call, both) for call in calls]
    assert [result.text for result in results] == ["operator a b__c"] * 2 + ["request a__b c"] * 2
    await executor.aclose()
