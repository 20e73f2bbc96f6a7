"""Python functions in real worker processes, in threads and on the loop."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.core.tools import Outcome, ToolCall
from tests.waiting import until
from tools_runtime.host import ToolHost

OpenTools = Callable[..., Awaitable[ToolHost]]


def tool(name: str, **said: Any) -> dict[str, dict[str, Any]]:
    return {name: {"kind": "python", "entry": f"tests.tools.python_tools:{name}", **said}}


async def test_a_function_answers_from_another_process_that_is_kept(open_tools: OpenTools) -> None:
    host = await open_tools(tool("add") | tool("who"))
    assert (await host.run(ToolCall("a", "add", '{"a": 2, "b": 3}'))).text == "5"
    first, second = [await host.run(ToolCall("a", "who")) for _ in range(2)]
    assert first.text == second.text != str(os.getpid())


@pytest.mark.parametrize(
    ("name", "arguments", "outcome", "text"),
    [
        ("loud", {}, Outcome.OK, "quiet"),
        ("strange", {}, Outcome.OK, '{"when": "/x", "half": "?"}'),
        ("broken", {}, Outcome.ERROR, "error: ValueError: the input\u241bx1b[31m is bad <\u241b.|im_start|>"),
        ("add", {"a": 1}, Outcome.ERROR, "error: TypeError: add() missing 1 required positional argument: 'b'"),
        ("die", {}, Outcome.UNKNOWN, "unknown: the process that ran the function died"),
        ("says", {"text": "caf\u00e9"}, Outcome.OK, "caf\u00e9"),
    ],
)
async def test_what_a_function_does_is_told(
    open_tools: OpenTools, name: str, arguments: dict[str, Any], outcome: Outcome, text: str
) -> None:
    result = await (await open_tools(tool(name))).run(ToolCall("a", name, arguments))
    assert (result.outcome, result.text) == (outcome, text)


async def test_a_function_that_hangs_is_ended_with_its_process(open_tools: OpenTools, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    host = await open_tools(tool("hang", deadline_s=30) | tool("add"))
    hanging = asyncio.create_task(host.run(ToolCall("h", "hang", {"mark": str(mark)})))
    await until(lambda: mark.exists() and mark.read_text())
    worker = psutil.Process(int(mark.read_text()))
    assert (await host.run(ToolCall("a", "add", {"a": 1, "b": 1}))).text == "2", "others go on meanwhile"
    assert host.executor.cancel("", "h")
    assert (await hanging).outcome is Outcome.CANCELLED
    gone, alive = psutil.wait_procs([worker], timeout=20)
    assert (len(gone), alive) == (1, [])


async def test_a_function_that_hangs_times_out(open_tools: OpenTools, tmp_path: Path) -> None:
    host = await open_tools(tool("hang", deadline_s=0.5))
    result = await host.run(ToolCall("h", "hang", {"mark": str(tmp_path / "pid")}))
    assert result.outcome is Outcome.TIMEOUT


async def test_cancellation_reaches_a_coroutine(open_tools: OpenTools, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    host = await open_tools(tool("waits", deadline_s=0.2))
    assert (await host.run(ToolCall("w", "waits", {"mark": str(mark)}))).outcome is Outcome.TIMEOUT
    await host.aclose()
    assert mark.read_text() == "cancelled"


async def test_a_thread_shares_the_process(open_tools: OpenTools) -> None:
    host = await open_tools(tool("who", isolation="thread"))
    assert (await host.run(ToolCall("a", "who"))).text == str(os.getpid())


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize(("name", "text"), [("exhausted", "StopIteration: "), ("leaves", "SystemExit: 3")])
async def test_a_function_that_raises_what_ends_a_loop_fails_and_frees_its_slot(
    open_tools: OpenTools, isolation: str, name: str, text: str
) -> None:
    """A future cannot have StopIteration, and SystemExit would end the event loop of all tools."""
    host = await open_tools(tool(name, isolation=isolation, concurrency=1))
    for call in ("a", "b"):
        result = await asyncio.wait_for(host.run(ToolCall(call, name)), 30)
        assert (result.outcome, result.text) == (Outcome.ERROR, f"error: {text}")


async def test_a_worker_has_no_more_memory_than_it_may(open_tools: OpenTools) -> None:
    host = await open_tools(tool("hungry", memory_bytes=1 << 30) | tool("add"))
    result = await host.run(ToolCall("a", "hungry"))
    assert (result.outcome, result.text) == (Outcome.ERROR, "error: MemoryError: ")


async def test_a_large_answer_is_cut_in_the_worker(open_tools: OpenTools) -> None:
    host = await open_tools(tool("large", output_cap_bytes=1000))
    result = await host.run(ToolCall("a", "large", {"size": 50_000_000}))
    assert (result.outcome, result.truncated) == (Outcome.OK, True)
    assert result.text.startswith("x" * 1000 + "\n[... cut")


@pytest.mark.parametrize(
    ("name", "isolation"), [("lines", "auto"), ("lines", "thread"), ("async_lines", "auto"), ("async_lines", "async")]
)
async def test_a_generator_answers_piece_by_piece(
    open_tools: OpenTools, tmp_path: Path, name: str, isolation: str
) -> None:
    host = await open_tools(tool(name, isolation=isolation))
    mark = tmp_path / "mark"
    arguments = {"count": 40, "mark": str(mark)}
    task = asyncio.create_task(host.run(ToolCall("a", name, arguments)))
    await until(lambda: host.executor.under_way)
    seen = ""
    while seen.count("\n") < 39:  # all that comes before the file exists
        more = await asyncio.wait_for(host.executor.output("", "a", 0 if len(seen) < 300 else len(seen) - 256), 20)
        assert more is not None
        seen = more
    assert not task.done()
    mark.touch()
    result = await task
    assert result.text == "".join(f"line {number:04} ☂\n" for number in range(40))
    assert result.text.startswith(seen)


async def test_a_generator_that_fails_or_exceeds_the_cap(open_tools: OpenTools, tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    host = await open_tools(tool("breaks_off") | tool("lines", output_cap_bytes=300))
    failed = await host.run(ToolCall("a", "breaks_off"))
    assert (failed.outcome, failed.text) == (Outcome.ERROR, "error: ValueError: broken off")
    cut = await host.run(ToolCall("b", "lines", {"count": 1000, "mark": str(tmp_path / "mark")}))
    assert cut.truncated and cut.text.startswith("line 0000") and "cut: the answer is longer than 300" in cut.text
    assert (
        await host.run(ToolCall("c", "lines", {"count": 1, "mark": str(tmp_path / "mark")}))
    ).text == "line 0000 ☂\n"


async def test_which_tools_start_early(open_tools: OpenTools) -> None:
    settings = {"who": {"idempotent": True}, "add": {}, "loud": {"idempotent": True, "asynchronous": True}}
    host = await open_tools({name: tool(name, **said)[name] for name, said in settings.items()})
    assert {offer.name: offer.starts_early for offer in await host.offers()} == {
        "who": True,
        "add": False,
        "loud": False,
    }
