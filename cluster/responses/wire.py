"""The JSON of responses and their events."""

import re

from openai import BaseModel

_TIMES = re.compile(r'"(created_at|completed_at)":(\d+)\.\d+')


def to_json(model: BaseModel) -> str:
    """Return the JSON text of a response, or of an event, with its times as whole seconds.

    OpenAI's models have them as floating-point numbers, but its server and the Open Responses schema have integers.
    """
    return _TIMES.sub(r'"\1":\2', model.to_json(indent=None))
