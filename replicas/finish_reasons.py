"""The finish reasons of chat completions, where vLLM 0.29 reports `tool_calls` for a turn that was cut.

vLLM reports it for each streamed answer in which a call began, for each whole answer from which its parser made a call,
and with `tool_choice: required` even if there is no call. A client that reads `tool_calls` runs the calls. So it stands
only where the model itself ended the answer after a call; see also `cluster.core.tools.split_complete`.
"""

import re
from collections.abc import Mapping

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from cluster.core.stream import Ending
from cluster.core.tools import ENDED_WITH_CALLS

_REASON = f'"finish_reason":"{ENDED_WITH_CALLS}"'
_CHOICE = re.compile(r'"choices":\[\{"index":(\d+)')


def ended_by_model(ending: Ending) -> bool:
    """Return whether the model itself ended the output, and no limit and no stop string did."""
    return ending.finish_reason == "stop" and not isinstance(ending.stop_reason, str)


def corrected_event(event: str, endings: Mapping[int, Ending]) -> str:
    """Return a server-sent event of vLLM with the right finish reason.

    Args:
        event: the event, which has at most one choice. Quotes within texts are escaped in it.
        endings: why the engine's outputs ended, by the index of the choice.
    """
    if not endings or _REASON not in event:
        return event
    found = _CHOICE.search(event)
    ending = endings.get(int(found[1])) if found else None
    if ending is None or ended_by_model(ending):
        return event
    return event.replace(_REASON, f'"finish_reason":"{ending.finish_reason}"')


def correct_answer(answer: ChatCompletionResponse, endings: Mapping[int, Ending]) -> None:
    """Set the right finish reasons in a whole answer."""
    for choice in answer.choices:
        ending = endings.get(choice.index)
        if choice.finish_reason != ENDED_WITH_CALLS or ending is None:
            continue
        if not ended_by_model(ending) or not choice.message.tool_calls:
            choice.finish_reason = ending.finish_reason
