"""Structured logs: one JSON object a line, with the ids of the program, the request and the turn that it is about.

Who knows whose work begins binds the ids; they stay with the work, through every task that it starts. All handlers of a
process get the format: of Ray Serve's logger, of vLLM's, of uvicorn's and of the root.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType

from cluster.observing_config import LogsConfig

FORMAT_VARIABLE = "CAESURA_LOG_FORMAT"
"""Environment variable with `logs.format`, for processes that are not given the configuration."""

LOGGERS = ("", "ray", "ray.serve", "ray.data", "vllm", "uvicorn", "uvicorn.error", "uvicorn.access", "caesura")
"""Those that may have handlers of their own."""

_NOTHING: Mapping[str, str | int] = MappingProxyType({})
_ids: ContextVar[Mapping[str, str | int]] = ContextVar("caesura_log_ids", default=_NOTHING)


def bind(**ids: str | int | None) -> None:
    """What is logged from here on is about these: ``program``, ``request``, ``run``, ``turn``, ``call``, ``tool``.

    For the task that calls, and those that it starts. None takes one away.
    """
    _ids.set({name: value for name, value in {**_ids.get(), **ids}.items() if value is not None})


def bound() -> Mapping[str, str | int]:
    """The ids that are bound here."""
    return _ids.get()


class JsonLines(logging.Formatter):
    """A record as one line of JSON.

    Args:
        part: what the process is, such as ``ingress``.
    """

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        """``time`` (UTC), ``level``, ``logger``, ``message``, ``part``, ``pid``, the ids, and ``exception``."""
        line: dict[str, str | int | None] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            "part": self._part,
            "pid": record.process,
            **_ids.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"))


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # a message whose arguments do not fit it is still a message
        return f"{record.msg} {record.args}"


def configure(logs: LogsConfig, part: str) -> None:
    """Let this process log as the configuration says; ``text`` leaves everything as Ray and vLLM have it.

    Args:
        logs: the section of the configuration.
        part: what the process is, such as ``ingress``.
    """
    if logs.format != "json":
        return
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.StreamHandler(sys.stderr))
    formatter = JsonLines(part)
    for handler in _handlers():
        handler.setFormatter(formatter)


def configure_from_environment(part: str) -> None:
    """The same in a process that is not given the configuration; `FORMAT_VARIABLE` says what it would say."""
    configure(LogsConfig(format="json" if os.environ.get(FORMAT_VARIABLE) == "json" else "text"), part)


def _handlers() -> Iterator[logging.Handler]:
    for name in LOGGERS:
        for handler in logging.getLogger(name).handlers:
            yield handler
            # Ray Serve's file is behind a handler that gathers records.
            target = getattr(handler, "target", None)
            if isinstance(target, logging.Handler):
                yield target
