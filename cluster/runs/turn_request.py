"""The request of a run's next turn: its body, its identity, and the ids from which it continues."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster.api.reasoning import template_settings
from cluster.core.program import ProgramIdentity
from cluster.core.tools import Outcome
from cluster.core.turn import Continuation
from cluster.runs.call_names import CallNaming
from cluster.runs.compaction import REQUEST
from cluster.runs.events import Call, RunSpec, ToolAnswer
from cluster.runs.state import AskTurn, RunState, next_step, runs_here, step, summary_tokens

ChatMessage = dict[str, Any]

_OF_ANSWERS = ("response_format", "stop", "ignore_eos", "logprobs", "top_logprobs")
"""Fields that apply to an answer and not to a summary."""


def joined_system(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with one message of the system instead of several at the beginning.

    Many chat templates reject a second one. Messages that are not only text stay as they are.
    """
    texts: list[str] = []
    for message in messages:
        text = _text_of(message["content"]) if message["role"] == "system" else None
        if text is None:
            break
        texts.append(text)
    if len(texts) < 2:
        return list(messages)
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *messages[len(texts) :]]


def _text_of(content: Any) -> str | None:
    """Return the text of a message's content; None: it has other parts."""
    if isinstance(content, str):
        return content
    if all(part["type"] == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return None


def body_messages(spec: RunSpec, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages of a run as its turns' bodies have them.

    A request for a response has a message of the system for its instructions, and one for each developer's item. The
    run's state keeps them apart, because a later response may have other instructions. The messages of other APIs are
    the client's own, or are made as they should be.
    """
    return joined_system(messages) if spec.api == "responses" else list(messages)


def body_place(state: RunState, place: int) -> int:
    """Return the place in the body of the next turn of a message after those of the system, by its place in the run."""
    return place - len(state.messages) + len(body_messages(state.spec, state.messages))


def prompt_fields(spec: RunSpec) -> dict[str, Any]:
    """Return the fields of the first turn's body that make its prompt. `/tokenize` takes them."""
    fields: dict[str, Any] = {"model": spec.model, "messages": body_messages(spec, spec.messages)}
    if spec.offers:
        fields["tools"] = [{"type": "function", "function": offer.function} for offer in spec.offers]
    effort, given = spec.sampling.get("reasoning_effort"), spec.sampling.get("chat_template_kwargs")
    if settings := template_settings(effort, given):
        fields["chat_template_kwargs"] = settings
    return fields


def turn_body(state: RunState, todo: AskTurn) -> dict[str, Any]:
    """Return a chat completions body with the whole conversation."""
    spec = state.spec
    body: dict[str, Any] = {**spec.sampling, "model": spec.model, "messages": body_messages(spec, state.messages)}
    body["max_completion_tokens"] = spec.limits.output_tokens - state.output_tokens
    if todo.summary:
        body = {name: value for name, value in body.items() if name not in _OF_ANSWERS}
        body["messages"].append(REQUEST)
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
    return Continuation(state.token_ids, body_place(state, state.covered)) if state.token_ids else None


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
    known_messages = (
        body_place(state, len(state.messages)) + [call.place for call in state.calls].index(answering.place) + 1
    )
    return {**body, "messages": body["messages"][:known_messages]}
