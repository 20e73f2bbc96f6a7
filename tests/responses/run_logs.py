"""Logs of runs, written by hand or at random, for the tests of what clients are told of them."""

from cluster.core.tools import ToolId, ToolOffer, function_object
from cluster.core.turn import CallDelta
from cluster.runs.events import (
    Accepted,
    Call,
    Ended,
    Generated,
    Limits,
    RunSpec,
    ToolAnswer,
    ToolIntent,
    TurnIntent,
    TurnResult,
)

LIMITS = Limits(turns=8, tool_calls=16, output_tokens=1000, wall_s=60.0, turn_attempts=3)


def offer(name="look", here=False, server=None, approval=False):
    own = None if server is None else name
    tool = (ToolId.of_operator(name) if here else None) if server is None else ToolId.of_request(server, name)
    name = name if server is None else f"{server}__{name}"
    function = {"name": name, "description": f"{name}!", "parameters": {"type": "object"}}
    is_here = here or server is not None
    return ToolOffer(name, function, here=is_here, server=server, server_tool=own, approval=approval, tool=tool)


def listed(label, name, description="", read_only=False, parameters=None):
    """A server's tool, as the tool runtime offers it."""
    called = f"{label}__{name}"
    function = function_object(called, description, parameters or {"type": "object"})
    return ToolOffer(
        called, function, here=True, server_tool=name, tool=ToolId.of_request(label, name), read_only=read_only
    )


def spec(*offers, **fields):
    defaults = {
        "id": "resp_1",
        "api": "responses",
        "tenant": "default",
        "program": "p",
        "identity": "{}",
        "model": "m",
        "created_s": 100.0,
        "limits": LIMITS,
        "messages": ({"role": "user", "content": "hi"},),
    }
    return RunSpec(offers=offers, **{**defaults, **fields})


def accepted(*offers, **fields):
    return Accepted(spec(*offers, **fields))


def call(name, arguments="{}", turn=1, index=0, id=None):
    return Call(turn, index, id or f"call_{turn}_{index}", name, arguments)


def piece(of):
    """A call, generated in one piece."""
    return CallDelta(of.index, of.id, of.name, of.arguments)


def result(turn=1, content="", *calls, reasoning="", finish="stop", prompt=10, cached=4, output=3):
    return TurnResult(
        turn=turn,
        continued=turn > 1,
        rendering="first",
        added_ids=b"\0\0\0\0",
        output_ids=b"\1\0\0\0",
        finish_reason=finish,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        began_s=0.0,
        ended_s=1.0,
        content=content,
        reasoning=reasoning,
        calls=calls,
    )


def tool_round(*calls, outcome="ok", text="found"):
    """The calls are run, and all answer."""
    answers = [ToolAnswer(one.turn, one.index, outcome, text) for one in calls]
    return [ToolIntent(tuple(one.place for one in calls)), *answers]


def turn(number, content="", *calls, reasoning=""):
    """A turn, generated in one piece."""
    pieces = Generated(number, content, reasoning, tuple(piece(one) for one in calls))
    return [TurnIntent(number), pieces, result(number, content, *calls, reasoning=reasoning)]


COMPLETED = Ended("completed", at_s=105.0)
