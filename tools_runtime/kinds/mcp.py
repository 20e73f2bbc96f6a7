"""MCP servers, as child processes or behind URLs, for both generations of the protocol (`mcp` 2.x).

Each actor has one connection to each server. It is made when it is needed, and again after it broke, with growing
waits. The connection lives in a task of its own, because the library ends the task that holds a connection when it
breaks. Callers only see that their call was lost.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from itertools import islice
from typing import Any, TypeGuard

import mcp_types as types
import pydantic
from mcp import Client, MCPError
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp_types.version import LATEST_MODERN_VERSION, MODERN_PROTOCOL_VERSIONS

from cluster.config.tools import McpTool
from cluster.core.errors import ToolError, ToolFailed, ToolRefused, ToolUnknown
from cluster.core.tools import ToolOffer, function_object, server_tool_name
from tools_runtime.addresses import Resolver
from tools_runtime.answer_images import IMAGE_CHARS, AnswerImages
from tools_runtime.kind import Invocation, KnownTool, LoopClock, TimerClock, ToolOutput, sleep_until
from tools_runtime.kinds.http import secret_headers
from tools_runtime.mcp_streams import CUT, LOST, STATUS, Limits, Loss, PipeStreams, Room, http_streams
from tools_runtime.recursive_schemas import without_recursion
from tools_runtime.schemas import ArgumentCheck, RecursiveSchema

logger = logging.getLogger("ray.serve")

MAX_TOOLS = 512
MAX_PAGES = 64
MAX_NAME_LENGTH = 64
MAX_DESCRIPTION_LENGTH = 4096
MAX_REPORTED = 64
"""Largest number of tools that cannot be used and are reported."""
MAX_REPORTED_LENGTH = 200
"""Largest number of characters of their names and reasons."""
LISTING_BYTES = 1 << 20
"""Bytes of the longest message that is no answer of a tool, such as a page of the listing."""
ENVELOPE_BYTES = 4096
"""Bytes that are always allowed for an answer, because not all of it is text."""
MAX_INPUT_ROUNDS = 10
"""Largest number of times that one call is repeated because the server asks for input."""
INPUT_WAIT_S = 0.25
"""Seconds before a call is repeated for which the server only wants its state back."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0

INHERITED = ("HOME", "LANG", "PATH", "TERM", "TZ", "USER")
"""Environment variables that a server process always gets."""

_ANSWER = pydantic.TypeAdapter(types.CallToolResult | types.InputRequiredResult)
NOT_SHOWN = "[resource, not shown]"
_MODES = {"auto": "auto", "handshake": "legacy", "stateless": LATEST_MODERN_VERSION}


class _Connection:
    """A connected client, and the state of its listing."""

    def __init__(self, client: Client, ended: asyncio.Event) -> None:
        self.client = client
        self.ended = ended
        self.stale = asyncio.Event()
        """Set until the tools are listed, and when the server has reported that they changed."""
        self.stale.set()
        self.listing = asyncio.Lock()
        self._calls = 0
        self._given_up = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a call in the block."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._end_if_unused()

    def give_up(self) -> None:
        """End the connection as soon as no call uses it. One call was lost, and the others may get their answers."""
        self._given_up = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._given_up and not self._calls:
            self.ended.set()


class McpKind:
    """One MCP server.

    Args:
        name: name of the entry, and the first part of its tools' names.
        config: its settings.
        clock: the clock of the waits between connections. None is the event loop's.
        resolver: looks up names. None makes one.

    Raises:
        ConfigError: a secret is not set.
    """

    def __init__(
        self, name: str, config: McpTool, clock: TimerClock | None = None, resolver: Resolver | None = None
    ) -> None:
        self._name = name
        self._config = config
        self._clock = clock or LoopClock()
        self._resolver = resolver or Resolver(config.private_networks)
        self._headers = {**config.headers, **secret_headers(config.headers_from_environment)}
        variables = secret_headers({variable: variable for variable in config.environment_from})
        inherited = {variable: os.environ[variable] for variable in INHERITED if variable in os.environ}
        self._environment = {**inherited, **variables, **config.environment}
        self._tools: dict[str, KnownTool] = {}
        """The tools by the server's own names."""
        self._left_out: dict[str, str] = {}
        """Tools that the server lists but that cannot be used, with the reason."""
        self._serving: asyncio.Task[None] | None = None
        self._connected: asyncio.Future[_Connection] | None = None
        self._failures = 0
        self._again_s = 0.0
        self._reason = ""

    async def open(self) -> None:
        """Connect, if the server is reachable."""
        with suppress(ToolError):
            await self._connection()

    def tools(self) -> Sequence[KnownTool]:
        """Return the tools that the server listed last."""
        return tuple(self._tools.values())

    def unusable(self) -> Sequence[ToolOffer]:
        """Return the tools that the server listed last but that cannot be called."""
        return [
            ToolOffer(
                server_tool_name(self._name, name)[:MAX_NAME_LENGTH],
                {},
                here=True,
                server_tool=name[:MAX_REPORTED_LENGTH],
                unusable=reason[:MAX_REPORTED_LENGTH],
            )
            for name, reason in islice(self._left_out.items(), MAX_REPORTED)
        ]

    async def tool(self, name: str) -> KnownTool | None:
        """Return a tool of the server, or None. The list is read again if the server reported a change.

        Raises:
            ToolFailed: the server cannot be reached.
        """
        connection = await self._connection()
        if connection.stale.is_set():
            await self._list(connection)
        return self._tools.get(name)

    async def run(self, invocation: Invocation) -> ToolOutput:
        """Call the tool on the server.

        Raises:
            ToolFailed: the server cannot be reached, or reports that the tool failed.
            ToolRefused: the server is at an address that it may not have.
            ToolUnknown: the connection was lost during the call.
        """
        connection = await self._connection()
        try:
            result = await self._answered(connection, invocation)
        except MCPError as error:
            raise self._mapped(connection, error) from error
        except pydantic.ValidationError as error:
            raise ToolFailed(f"the MCP server's answer is not one: {error.error_count()} faults") from error
        images = AnswerImages(kept=invocation.images and not result.is_error)
        text = "\n".join([await _shown(part, images) for part in result.content])
        if not text and result.structured_content is not None:
            text = pydantic.TypeAdapter(Any).dump_json(result.structured_content).decode()
        if result.is_error:
            raise ToolFailed(text or "the tool failed, and did not say why")
        return ToolOutput(text, truncated=bool((result.meta or {}).get(CUT)), images=tuple(images.urls))

    async def aclose(self) -> None:
        """End the connection, and the server if it is a child process."""
        try:
            if self._serving is not None:
                self._serving.cancel()
                await asyncio.wait({self._serving})
        finally:
            self._resolver.close()

    async def _connection(self) -> _Connection:
        if self._connected is not None and self._connected.done() and self._connected.result().ended.is_set():
            assert self._serving is not None
            await asyncio.wait({self._serving})  # a connection that has ended is taken down before there is another
        if self._serving is None or self._serving.done():
            wait_s = self._again_s - self._clock.now_s()
            if wait_s > 0:
                raise self._down(f"; it is tried again in {wait_s:.1f} s")
            self._connected = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._connected), name=f"mcp {self._name}")
        assert self._connected is not None
        connected = self._connected
        either: set[asyncio.Future[Any]] = {connected, self._serving}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            raise self._down("")
        return connected.result()

    async def _serve(self, connected: "asyncio.Future[_Connection]") -> None:
        """Keep a connection until it breaks."""
        ended = asyncio.Event()
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._config.connect_timeout_s):
                    client = self._client(ended)
                    connection = _Connection(client, ended)
                    client.message_handler = _handler(connection)
                    await stack.enter_async_context(client)
                    await self._list(connection)
                self._failures, self._again_s = 0, 0.0
                connected.set_result(connection)
                watch = asyncio.create_task(_watch(connection))
                stack.callback(watch.cancel)
                await ended.wait()
                self._reason = "cannot be reached: it ended"
        except Exception as error:  # noqa: BLE001 - whatever breaks a connection breaks this one only
            self._reason = _why_down(error)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self._reason = "cannot be reached: the connection broke"
        self._failures += 1
        wait_s = min(FIRST_WAIT_S * 2 ** (self._failures - 1), LONGEST_WAIT_S)
        # A connection that was made once is made again at once.
        self._again_s = 0.0 if connected.done() else self._clock.now_s() + wait_s

    def _client(self, ended: asyncio.Event) -> Client:
        config = self._config
        limits = Limits(Room(max(config.output_cap_bytes, ENVELOPE_BYTES), IMAGE_CHARS), Room(LISTING_BYTES))
        if config.url is None:
            pipes = PipeStreams(config.command, self._environment, limits)
            pipes.ended = ended
            transport: Any = pipes
        else:
            resolver = None if config.private_addresses else self._resolver
            transport = http_streams(config.url, self._headers, limits, config.deadline_s + 30, resolver)
        return Client(transport, mode=_MODES[config.protocol], cache=None)

    async def _answered(self, connection: _Connection, invocation: Invocation) -> types.CallToolResult:
        try:
            return await self._unless_ended(connection, self._call(connection, invocation))
        except MCPError as error:
            if error.code != types.HEADER_MISMATCH:
                raise
        # Nothing was run: the server wants arguments in headers that its new listing names.
        connection.stale.set()
        await self._list(connection)
        return await self._unless_ended(connection, self._call(connection, invocation))

    async def _call(self, connection: _Connection, invocation: Invocation) -> types.CallToolResult:
        # Not Client.call_tool: that would check the answer against the server's own schema, in unbounded time.
        params = types.CallToolRequestParams(name=invocation.tool, arguments=dict(invocation.arguments))
        for _ in range(MAX_INPUT_ROUNDS):
            request = types.CallToolRequest(params=params)
            try:
                answer = await connection.client.session.send_request(request, _ANSWER)
            except pydantic.ValidationError as error:
                answer = _untyped(error)
            if isinstance(answer, types.CallToolResult):
                return answer
            asked = answer.input_requests or {}
            if not asked:
                await sleep_until(self._clock, self._clock.now_s() + INPUT_WAIT_S)
            given = {key: self._dismissed(one) for key, one in asked.items()}
            repeated = {"input_responses": given or None, "request_state": answer.request_state}
            params = params.model_copy(update=repeated)
        raise ToolFailed(f"the MCP server {self._name} asked for input {MAX_INPUT_ROUNDS} times")

    def _dismissed(self, asked: types.InputRequest) -> types.ElicitResult:
        # Nobody can be asked during a call. A server that asks although no client said that it can gets an answer.
        if not isinstance(asked, types.ElicitRequest):
            raise ToolFailed(f"the MCP server {self._name} asks for {asked.method}, which is not supported")
        return types.ElicitResult(action="cancel")

    async def _unless_ended(self, connection: _Connection, call: Any) -> types.CallToolResult:
        """Return the call's answer, unless the connection breaks first."""
        assert self._serving is not None
        task = asyncio.create_task(call)
        with connection.in_use():
            try:
                await asyncio.wait({task, self._serving}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done() or task.cancelled():
                    raise ToolUnknown(f"the MCP server {self._name} went away during the call")
                result: types.CallToolResult = task.result()
                return result
            finally:
                task.cancel()

    def _mapped(self, connection: _Connection, error: MCPError) -> ToolError:
        if error.code == types.CONNECTION_CLOSED:
            if self._config.url is None:
                connection.ended.set()
            else:
                connection.give_up()  # it may be only the stream with this call's answer that has ended
            return ToolUnknown(f"the MCP server {self._name} went away during the call")
        if error.code == types.INVALID_REQUEST and error.message == "Session terminated":
            connection.ended.set()
            return ToolFailed(f"the MCP server {self._name} has forgotten the session", transient=True)
        if error.code in (types.INVALID_PARAMS, types.METHOD_NOT_FOUND):
            connection.stale.set()
        if (loss := _loss(error)) is not None:
            return self._without_answer(connection, loss, error.message)
        if _is_status(error):
            return ToolFailed(f"the MCP server {self._name} answers with {error.message}")
        return ToolFailed(f"the MCP server {self._name} says: {error.message} ({error.code})")

    def _without_answer(self, connection: _Connection, loss: Loss, reason: str) -> ToolError:
        if loss in (Loss.UNSENT, Loss.UNKNOWN):
            connection.give_up()
        if loss is Loss.UNKNOWN:
            return ToolUnknown(f"the MCP server {self._name} went away during the call")
        if loss is Loss.UNUSABLE:
            return ToolFailed(f"the MCP server {self._name}: {reason}")
        text = f"the MCP server {self._name} cannot be reached: {reason}"
        return ToolRefused(text) if loss is Loss.REFUSED else ToolFailed(text, transient=True)

    async def _list(self, connection: _Connection) -> None:
        """Read the list of the tools, unless it was read while this call waited for the same."""
        limit_s = self._config.connect_timeout_s
        try:
            async with asyncio.timeout(limit_s), connection.listing:
                if connection.stale.is_set():
                    await self._read_list(connection)
        except TimeoutError:
            text = f"the MCP server {self._name} did not list its tools within {limit_s:g} s"
            raise ToolFailed(text, transient=True) from None

    async def _read_list(self, connection: _Connection) -> None:
        connection.stale.clear()  # a change that is reported from now on may not be in what is read
        try:
            await self._take(await self._listed(connection))
        except BaseException:
            connection.stale.set()
            raise

    async def _listed(self, connection: _Connection) -> list[types.Tool]:
        """Return the allowed tools. No more pages are read once there are more tools than can be used."""
        allowed = self._config.allowed_tools
        listed: list[types.Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            parameters = types.PaginatedRequestParams(cursor=cursor)
            try:
                page = await connection.client.session.list_tools(params=parameters if cursor else None)
            except (MCPError, pydantic.ValidationError) as error:
                if _loss(error) in (Loss.UNSENT, Loss.UNKNOWN):
                    connection.give_up()
                raise ToolFailed(f"the MCP server {self._name} does not list its tools: {_innermost(error)}") from error
            listed += [tool for tool in page.tools if allowed is None or tool.name in allowed]
            cursor = page.next_cursor
            if cursor is None or len(listed) > MAX_TOOLS:
                break
        return listed

    async def _take(self, listed: Sequence[types.Tool]) -> None:
        tools: dict[str, KnownTool] = {}
        names: set[str] = set()
        left_out = {tool.name: f"the server lists more than {MAX_TOOLS} tools" for tool in listed[MAX_TOOLS:]}
        for tool in listed[:MAX_TOOLS]:
            await asyncio.sleep(0)  # a schema may take some milliseconds, and calls of others go on meanwhile
            name = server_tool_name(self._name, tool.name)
            if len(name) > MAX_NAME_LENGTH or name in names:
                left_out[tool.name] = f"its name {name!r} is too long, or taken"
                continue
            before = self._tools.get(tool.name)
            try:
                check = _check(tool.input_schema)
                if before is not None and before.check.schema != check.schema:
                    check = ArgumentCheck(check.schema, _changed(check.schema))
                elif before is not None:
                    check = before.check
            except ValueError as error:
                left_out[tool.name] = f"its parameters are {error}"
                continue
            read_only = tool.annotations is not None and tool.annotations.read_only_hint is True
            function = function_object(name, (tool.description or "")[:MAX_DESCRIPTION_LENGTH], check.schema)
            offer = ToolOffer(name, function, here=True, server_tool=tool.name, read_only=read_only)
            names.add(name)
            tools[tool.name] = KnownTool(offer, check)
        self._tools, self._left_out = tools, left_out
        if left_out:
            reasons = "; ".join(f"{name[:100]!r}: {reason[:200]}" for name, reason in left_out.items())
            logger.warning("the MCP server %s has tools that cannot be used: %s", self._name, reasons[:2000])
        known = {tool.name for tool in listed}
        if missing := [name for name in self._config.allowed_tools or () if name not in known]:
            not_listed = ", ".join(repr(name[:100]) for name in missing)
            logger.warning("the MCP server %s does not list allowed tools: %s", self._name, not_listed[:2000])

    def _down(self, addition: str) -> ToolFailed:
        return ToolFailed(f"the MCP server {self._name} {self._reason}{addition}", transient=True)


def _handler(connection: _Connection) -> Any:
    async def handle(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            connection.stale.set()

    return handle


async def _watch(connection: _Connection) -> None:
    """Subscribe to changes of the tools, which clients have to do from protocol 2026-07-28 on."""
    if connection.client.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return
    try:
        async with connection.client.listen(tools_list_changed=True) as events:
            async for _ in events:
                connection.stale.set()
    except MCPError as error:
        if _loss(error) is not None:
            connection.give_up()  # another connection hears of changes
    except (ListenNotSupportedError, SubscriptionLost, TimeoutError):
        pass


def _check(schema: Mapping[str, Any]) -> ArgumentCheck:
    try:
        return ArgumentCheck(schema)
    except RecursiveSchema:
        return ArgumentCheck(without_recursion(schema))


def _changed(schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties")
    names = ", ".join(properties) if isinstance(properties, dict) else ""
    return f" (the server has changed this tool's parameters; they are now: {names[:300]})"


def _untyped(error: pydantic.ValidationError) -> types.CallToolResult:
    """Return an answer that is only wrong because it has no type: it is complete. The library rejects it.

    Raises:
        ValidationError: it is wrong otherwise.
    """
    faults = error.errors(include_url=False)
    if any((fault["type"], fault["loc"][-1:]) != ("missing", ("resultType",)) for fault in faults):
        raise error
    return types.CallToolResult.model_validate({**faults[0]["input"], "resultType": "complete"}, by_name=False)


async def _shown(part: Any, images: AnswerImages) -> str:
    if isinstance(part, types.TextContent):
        return part.text
    if isinstance(part, types.ImageContent):
        return await images.place(part.mime_type, part.data)
    if isinstance(part, types.EmbeddedResource) and isinstance(part.resource, types.BlobResourceContents):
        media_type = part.resource.mime_type or ""
        return await images.place(media_type, part.resource.blob) if media_type.startswith("image/") else NOT_SHOWN
    if isinstance(part, types.EmbeddedResource) and isinstance(part.resource, types.TextResourceContents):
        return part.resource.text
    if isinstance(part, types.ResourceLink):
        return f"[resource {part.uri}]"
    return f"[{part.type}, not shown]"


def _why_down(error: BaseException) -> str:
    """Return why there is no connection, as the predicate of a sentence about the server."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = error.__cause__ if isinstance(error, ToolFailed) else error
    return f"answers with {cause.message}" if _is_status(cause) else f"cannot be reached: {_innermost(error)}"


def _is_status(error: BaseException | None) -> TypeGuard[MCPError]:
    """Return whether the error stands for an HTTP status, which is its message."""
    return isinstance(error, MCPError) and isinstance(error.data, dict) and STATUS in error.data


def _loss(error: BaseException) -> Loss | None:
    """Return what is known of a request, if the error stands for one without a usable answer."""
    data = error.data if isinstance(error, MCPError) else None
    try:
        return Loss(str(data[LOST])) if isinstance(data, dict) and LOST in data else None
    except ValueError:
        return None


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, pydantic.ValidationError):
        fault = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"[:500]
    return (str(error) or type(error).__name__)[:500]
