"""Going on from an earlier response: its conversation, what its last calls still want, and its token ids."""

from dataclasses import dataclass

from cluster.errors import BadRequest
from cluster.responses.conversation import ENDED, ChatMessage, Given, denied, tool_message
from cluster.responses.ids import approval_request_id
from cluster.run import RunState, conversation, runs_here
from cluster.run_events import Call, Prior


@dataclass(frozen=True, slots=True)
class History:
    """What came before the request's own input."""

    messages: tuple[ChatMessage, ...] = ()
    approved: tuple[Call, ...] = ()
    approval_ids: tuple[str, ...] = ()
    """The requests for approval that ``approved`` answers, in its order."""
    prior: Prior | None = None


def history(previous: RunState, instructions: str | None, given: Given) -> History:
    """The conversation of ``previous``, its open calls answered from the input.

    Args:
        previous: the final state.
        instructions: the new request's; the earlier ones are not carried over.
        given: what the input says of calls; what is used here is taken out.

    Raises:
        BadRequest: the earlier response is not done, or a call of its last turn has no answer.
    """
    if previous.ended is None:
        message = f"the response {previous.spec.id!r} is not done; a response can only follow one that is"
        raise BadRequest(message, param="previous_response_id", code="previous_response_not_done")
    answers: list[ChatMessage] = []
    approved: list[Call] = []
    approval_ids: list[str] = []
    # A run that was ended among its calls has not told the model any of their answers.
    cut = any(runs_here(previous, call) for call in previous.waiting)
    for call in previous.calls:
        answer = previous.answers.get(call.place)
        if runs_here(previous, call):
            if cut:
                answers.append(tool_message(call.id, ENDED if answer is None else answer.text))
            continue
        offer = previous.offer(call.name)
        if offer is None or not offer.approval:
            answers.append(tool_message(call.id, given.output(call.id)))
            continue
        request_id = approval_request_id(previous.spec.id, call)
        response = given.approval(request_id)
        if response.approve:
            approved.append(Call(0, len(approved), call.id, call.name, call.arguments))
            approval_ids.append(request_id)
        else:
            answers.append(tool_message(call.id, denied(response)))
    told = conversation(previous)[len(previous.messages) :]
    messages = (*previous.messages, *answers, *told)
    before = previous.spec.echo.get("instructions")
    prior = Prior(previous.token_ids, previous.covered) if previous.covered else None
    if before != instructions:
        messages, prior = _with_instructions(messages, before, instructions), None
    return History(messages, tuple(approved), tuple(approval_ids), prior)


def _with_instructions(
    messages: tuple[ChatMessage, ...], before: str | None, instructions: str | None
) -> tuple[ChatMessage, ...]:
    rest = messages if before is None else messages[1:]
    return rest if instructions is None else (system_message(instructions), *rest)


def system_message(instructions: str) -> ChatMessage:
    """The first message of a conversation with instructions."""
    return {"role": "system", "content": instructions}
