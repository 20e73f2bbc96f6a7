"""The second part of the demo: each request is a whole program, whose tools the cluster runs."""

import asyncio
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI
from openai.types.responses import Response
from openai.types.responses.response_output_item import McpCall
from rich.console import Console
from rich.table import Table

from cluster.core.errors import IntegrityError
from cluster.offline.bench.terminal import print_table
from cluster.offline.demo.tools import calculate

PLAN = ("calculator", "shell", "notes__add", "calculator", "notes__add")
"""The tool that each turn must call, since a random model would call none. The turn after them answers."""
SERVERS = {"notes__add": ("notes", "add")}
"""The MCP server of a tool and the tool's name there. Any other tool is its own server."""

PROGRAMS = 12
AT_ONCE = 2
"""Concurrent programs. Their contexts fit into one replica's memory, so that only resumption causes recomputation."""
MAX_OUTPUT_TOKENS = 700
"""Output tokens of a whole program, at most."""
TIMEOUT_S = 120.0
PROMPT = "You have a calculator, a shell and a notebook. Work on task {number}, step by step, then sum up. "
FILLER = "Each step takes one tool, its answer is part of what you know in the next step, and nothing is forgotten. "


@dataclass(frozen=True, slots=True)
class ServerSide:
    """The server's report of the programs, summed up."""

    programs: int
    turns: int
    outcomes: dict[tuple[str, str], int]
    """Number of calls by tool and outcome."""
    run_s: dict[str, list[float]]
    """Run times of the calls in seconds, by tool."""
    resumes: int
    recomputed: list[int]
    """Recomputed tokens of each turn after a program's first: prompt tokens that were neither cached nor new."""
    continued: int
    """Number of turns whose prompt extended the earlier token ids exactly."""


def request(number: int, model: str) -> dict[str, Any]:
    """Return the arguments of `client.responses.create` for one program."""
    return {
        "model": model,
        "input": PROMPT.format(number=number) + FILLER * 12,
        "tools": [{"type": "function", "name": name, "server_side": True} for name in sorted(set(PLAN))],
        "max_output_tokens": MAX_OUTPUT_TOKENS,
        "temperature": 1.0,
        "extra_body": {"tool_choices": [{"type": "function", "name": name} for name in PLAN]},
        "extra_headers": {"x-session-id": f"demo-{number}"},
    }


async def run_programs(url: str, model: str) -> ServerSide:
    """Run the programs, check each tool's answer, and collect the server's reports.

    Raises:
        IntegrityError: a program did not complete, or a call was not executed.
    """
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0) as client:
        room = asyncio.Semaphore(AT_ONCE)

        async def respond(number: int) -> Response:
            async with room:
                response: Response = await client.responses.create(**request(number, model))
                return response

        responses = await asyncio.gather(*map(respond, range(PROGRAMS)))
    for response in responses:
        require_executed(response)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        programs = [(await http.get(f"/v1/programs/demo-{number}")).json() for number in range(PROGRAMS)]
    return collected(programs)


def require_executed(response: Response) -> None:
    """Check that every planned call is in the output, and that the calculator's answers are correct.

    Raises:
        IntegrityError: a call is missing or an answer is wrong.
    """
    calls = [item for item in response.output if isinstance(item, McpCall)]
    called = [(call.server_label, call.name) for call in calls]
    planned = [SERVERS.get(name, (name, name)) for name in PLAN]
    if called[: len(planned)] != planned:
        raise IntegrityError(f"{response.id} is {response.status} and called {called}, not {planned}")
    for call in calls:
        if call.name == "calculator":
            wanted = calculate(**json.loads(call.arguments))
            if call.output != wanted:
                raise IntegrityError(f"the calculator answered {call.output!r}, not {wanted!r}")


def collected(programs: Sequence[dict[str, Any]]) -> ServerSide:
    """Sum up the answers of `/v1/programs/{id}`."""
    turns = [turn for program in programs for run in program["runs"] for turn in run["turns"]]
    calls = [call for turn in turns for call in turn["calls"]]
    run_s: dict[str, list[float]] = {}
    for call in calls:
        run_s.setdefault(call["name"], []).append(call["run_s"])
    recomputed: list[int] = []
    for program in programs:
        for run in program["runs"]:
            for before, turn in zip(run["turns"], run["turns"][1:], strict=False):
                known = before["prompt_tokens"] + before["output_tokens"]
                recomputed.append(max(0, known - turn["cached_tokens"]))
    return ServerSide(
        programs=len(programs),
        turns=len(turns),
        outcomes=dict(Counter((call["name"], str(call["outcome"])) for call in calls)),
        run_s=run_s,
        resumes=len(recomputed),
        recomputed=recomputed,
        continued=sum(turn["rendering"] == "continued" for turn in turns),
    )


def print_server_side(ran: ServerSide, console: Console) -> None:
    """Print the results of the second part of the demo."""
    table = Table("tool", "outcome", "calls", "median run", title="Tool calls, each really executed")
    for (tool, outcome), number in sorted(ran.outcomes.items()):
        table.add_row(tool, outcome, str(number), f"{1000 * statistics.median(ran.run_s[tool]):.1f} ms")
    print_table(table, console)
    console.print(
        f"{ran.programs} programs, {ran.turns} turns, one HTTP request each. {ran.continued} of {ran.resumes} later"
        f" turns went on from the exact token ids; of the context before them"
        f" {statistics.median(ran.recomputed):.0f} tokens were computed again in the median,"
        f" {max(ran.recomputed)} at most."
    )
