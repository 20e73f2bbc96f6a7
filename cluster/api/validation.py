"""Validation of JSON bodies with pydantic models. Errors name the invalid field by its path in the body."""

from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic

from cluster.core.errors import BadRequest

Model = TypeVar("Model", bound=pydantic.BaseModel)


def validated(model: type[Model], body: Mapping[str, Any]) -> Model:
    """Validate ``body`` with ``model``.

    Raises:
        BadRequest: the body is invalid. ``param`` is the dotted path of the invalid field.
    """
    try:
        return model.model_validate(body)
    except pydantic.ValidationError as error:
        faults = [(field_path(body, fault["loc"]), fault) for fault in error.errors(include_url=False)]
        # Of the alternatives of a union, the one whose error is deepest is assumed to be the intended one.
        path, fault = max(faults, key=lambda found: len(found[0]))
        message = fault["msg"]
        if fault["type"] == "missing" and path[-1:] != [missing := str(fault["loc"][-1])]:
            path.append(missing)
        param = ".".join(path) or None
        raise BadRequest(f"{param}: {message}" if param else message, param=param) from error


def field_path(body: Any, location: tuple[int | str, ...]) -> list[str]:
    """Return the steps of a validation error's location that are keys of ``body``. Other steps name pydantic's
    types.
    """
    path: list[str] = []
    value = body
    for step in location:
        match value, step:
            case Mapping(), str() if step in value:
                value = value[step]
            case list(), int() if step < len(value):
                value = value[step]
            case Mapping(), str() if not path:
                return [step]  # a required field that is missing
            case _:
                continue
        path.append(str(step))
    return path
