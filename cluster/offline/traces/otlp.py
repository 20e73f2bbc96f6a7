"""OTLP's JSON: the parts of an ``ExportTraceServiceRequest`` that a trace of agents needs. Names are OTLP's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.core.errors import TraceError
from cluster.core.recorded_turn import lines_of, parsed


class _Json(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Value(_Json):
    stringValue: str | None = None
    intValue: int | None = None
    doubleValue: float | None = None
    boolValue: bool | None = None

    def plain(self) -> Any:
        given = (self.stringValue, self.intValue, self.doubleValue, self.boolValue)
        return next((value for value in given if value is not None), None)


class _Attribute(_Json):
    key: str
    value: _Value = _Value()


class _Status(_Json):
    code: int | str = 0


class Span(_Json):
    """A span. Times are Unix time in nanoseconds."""

    traceId: str
    spanId: str = ""
    parentSpanId: str = ""
    startTimeUnixNano: Annotated[int, Field(ge=0)]
    endTimeUnixNano: Annotated[int, Field(ge=0)]
    attributes: tuple[_Attribute, ...] = ()
    status: _Status = _Status()

    def values(self) -> dict[str, Any]:
        """Return the attributes that have a plain value; that of any other attribute is None."""
        return {one.key: one.value.plain() for one in self.attributes}

    @property
    def is_error(self) -> bool:
        """Whether the status of the span is an error."""
        return self.status.code in (2, "STATUS_CODE_ERROR")


class _Scope(_Json):
    spans: tuple[Span, ...] = ()


class _Resource(_Json):
    scopeSpans: tuple[_Scope, ...] = ()


class Export(_Json):
    """An ``ExportTraceServiceRequest``."""

    resourceSpans: tuple[_Resource, ...]

    def placed(self, where: str) -> Iterator[tuple[str, Span]]:
        """Yield the spans, each with its place, which begins with ``where``."""
        for r, resource in enumerate(self.resourceSpans):
            for s, scope in enumerate(resource.scopeSpans):
                for n, span in enumerate(scope.spans):
                    yield f"{where}: resourceSpans.{r}.scopeSpans.{s}.spans.{n}", span


def exports(path: Path) -> Iterator[tuple[str, Export]]:
    """Yield the exports of a file, each with its position: one a line, or all lines together are one.

    Raises:
        TraceError: the file cannot be read, or is not OTLP. The message names the file, the line and the field.
    """
    lines = lines_of(path)
    for number, line in lines:
        try:
            json.loads(line)
        except (ValueError, RecursionError) as error:
            if number > 1:
                raise TraceError(f"{path}:{number}: the line: {error}") from error
            yield f"{path}:1", _document(path, b"".join([line, *(text for _, text in lines)]))
            return
        yield f"{path}:{number}", parsed(line, f"{path}:{number}", Export)


def _document(path: Path, text: bytes) -> Export:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number that is too long, or too many brackets
        raise TraceError(f"{path}:1: the document: {error}") from error
    try:
        return Export.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise TraceError(f"{path}:1: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
