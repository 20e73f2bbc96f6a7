"""Structured logs: one JSON object per line, with the ids of the program, the request and the turn.

`bind` sets the ids for the current task and for the tasks that it starts. All handlers of a process get this format:
those of Ray Serve's, vLLM's, uvicorn's and the root logger.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType

from cluster.config.sections import LogsConfig

FORMAT_VARIABLE = "CAESURA_LOG_FORMAT"
"""Environment variable with `logs.format`, for processes that do not get the configuration."""

LOGGERS = ("", "ray", "ray.serve", "ray.data", "vllm", "uvicorn", "uvicorn.error", "uvicorn.access", "caesura")
"""Loggers that may have handlers of their own."""

_NO_IDS: Mapping[str, str | int] = MappingProxyType({})
_ids: ContextVar[Mapping[str, str | int]] = ContextVar("caesura_log_ids", default=_NO_IDS)


def bind(**ids: str | int | None) -> None:
    """Add ids to the log lines of this task and of the tasks that it starts. The value None removes an id.

    The ids are ``program``, ``request``, ``run``, ``turn``, ``call`` and ``tool``.
    """
    _ids.set({name: value for name, value in {**_ids.get(), **ids}.items() if value is not None})


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    Args:
        part: the role of the process, such as ``ingress``.
    """

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        """Format a record. The keys are ``time`` (UTC), ``level``, ``logger``, ``message``, ``part``, ``pid``, the ids
        and ``exception``.
        """
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # The arguments do not fit the message.
            message = f"{record.msg} {record.args}"
        line: dict[str, str | int | None] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
            "part": self._part,
            "pid": record.process,
            **_ids.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"))


def configure(logs: LogsConfig, part: str) -> None:
    """Set up this process's logs. With the format ``text``, the logs of Ray and vLLM are not changed.

    Args:
        logs: the section of the configuration.
        part: the role of the process, such as ``ingress``.
    """
    if logs.format != "json":
        return
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.StreamHandler(sys.stderr))
    formatter = JsonFormatter(part)
    for handler in _handlers():
        handler.setFormatter(formatter)


def configure_from_environment(part: str) -> None:
    """Set up the logs of a process that does not get the configuration, by `FORMAT_VARIABLE`."""
    configure(LogsConfig(format="json" if os.environ.get(FORMAT_VARIABLE) == "json" else "text"), part)


def _handlers() -> Iterator[logging.Handler]:
    for name in LOGGERS:
        for handler in logging.getLogger(name).handlers:
            yield handler
            # Ray Serve's file handler is the target of a memory handler.
            target = getattr(handler, "target", None)
            if isinstance(target, logging.Handler):
                yield target
