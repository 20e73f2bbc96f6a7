"""The request of a run's next turn: its body, its identity, and the ids from which it continues."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cluster.core.program import ProgramIdentity
from cluster.core.tools import Outcome
from cluster.core.turn import Continuation
from cluster.runs.call_names import CallNaming
from cluster.runs.compaction import REQUEST
from cluster.runs.events import Call, RunSpec, ToolAnswer
from cluster.runs.state import AskTurn, RunState, next_step, runs_here, step, summary_tokens

_OF_ANSWERS = ("response_format", "stop", "ignore_eos", "logprobs", "top_logprobs")
"""Fields that apply to an answer and not to a summary."""


def prompt_fields(spec: RunSpec) -> dict[str, Any]:
    """Return the fields of the first turn's body that make its prompt. `/tokenize` takes them."""
    fields: dict[str, Any] = {"model": spec.model, "messages": list(spec.messages)}
    if spec.offers:
        fields["tools"] = [{"type": "function", "function": offer.function} for offer in spec.offers]
    if "chat_template_kwargs" in spec.sampling:
        fields["chat_template_kwargs"] = spec.sampling["chat_template_kwargs"]
    return fields


def turn_body(state: RunState, todo: AskTurn) -> dict[str, Any]:
    """Return a chat completions body with the whole conversation."""
    spec = state.spec
    body: dict[str, Any] = {**spec.sampling, "model": spec.model, "messages": list(state.messages)}
    body["max_completion_tokens"] = spec.limits.output_tokens - state.output_tokens
    if todo.summary:
        body = {name: value for name, value in body.items() if name not in _OF_ANSWERS}
        body["messages"] = [*state.messages, REQUEST]
        body["max_completion_tokens"] = summary_tokens(state)
    if spec.offers:
        body["tools"] = [{"type": "function", "function": offer.function} for offer in spec.offers]
        body["parallel_tool_calls"] = spec.parallel
        if todo.tool_choice is not None:
            body["tool_choice"] = todo.tool_choice
    return body


def turn_identity(state: RunState, todo: AskTurn, known_as: CallNaming) -> ProgramIdentity:
    """Return the identity of a turn, with what is known of the tools before and after it.

    No turn says that it is the last one of its program, because nobody knows it before the turn has ended.
    """
    identity = ProgramIdentity.decode(state.spec.identity)
    hints = identity.hints
    if state.calls:
        hints = replace(hints, last_tool="+".join(sorted(state.known_as(call, known_as) for call in state.calls)))
    if isinstance(todo.tool_choice, dict):
        named = todo.tool_choice.get("function", {}).get("name")
        hints = replace(hints, expected_tool=named or hints.expected_tool)
    return replace(identity, tenant=state.spec.tenant, program_id=state.spec.program, hints=hints, last_turn=False)


def continuation_of(state: RunState) -> Continuation | None:
    """Return the ids from which the next turn continues. None: there are none."""
    return Continuation(state.token_ids, state.covered) if state.token_ids else None


def known_body(state: RunState, answering: Call, text: str) -> Mapping[str, Any] | None:
    """Return the body of the next turn as far as it is known while the last turn's calls run.

    Its last message is the answer of ``answering``, of which ``text`` is known. The calls before it have their answers.
    None: the next turn does not follow from these answers alone.
    """
    if not all(runs_here(state, call) for call in state.waiting):
        return None
    expected = state
    for call in state.waiting:
        known = text if call.place == answering.place else ""
        expected = step(expected, ToolAnswer(call.turn, call.index, Outcome.OK, known))
    todo = next_step(expected)
    if not isinstance(todo, AskTurn) or todo.summary:
        return None
    body = turn_body(expected, todo)
    known_messages = len(state.messages) + [call.place for call in state.calls].index(answering.place) + 1
    return {**body, "messages": body["messages"][:known_messages]}
