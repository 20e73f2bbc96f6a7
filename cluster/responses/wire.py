"""The JSON of responses and their events."""

import re
from typing import get_args

from openai import BaseModel
from openai.types.responses import Response, ResponseStreamEvent

_TIMES = re.compile(r'"(created_at|completed_at)":(\d+)\.\d+')


def to_json(model: BaseModel) -> str:
    """Return the JSON text of a response, or of an event, with its times as whole seconds.

    OpenAI's models have them as floating-point numbers, but its server and the Open Responses schema have integers.
    """
    return _TIMES.sub(r'"\1":\2', model.to_json(indent=None))


def build_models() -> None:
    """Build the validators of responses and of all their events.

    OpenAI's package builds each at its first use, which would stop the event loop for up to 40 ms.
    """
    for model in (Response, *get_args(get_args(ResponseStreamEvent)[0])):
        model.model_rebuild()
