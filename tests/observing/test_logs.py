"""What a process logs, as lines of JSON."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from typing import Any

import pytest

from cluster.config.sections import LogsConfig
from cluster.observing import logs
from cluster.observing.logs import FORMAT_VARIABLE, bind, configure, configure_from_environment

JSON = LogsConfig(format="json")


class Log:
    """A logger with one handler, as Ray Serve has one: it gathers records for another."""

    def __init__(self, name: str) -> None:
        self.out = io.StringIO()
        self.logger = logging.getLogger(name)
        self.handler = MemoryHandler(1, target=logging.StreamHandler(self.out))
        self.logger.addHandler(self.handler)

    def lines(self) -> list[dict[str, Any]]:
        self.handler.flush()
        return [json.loads(line) for line in self.out.getvalue().splitlines()]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.setattr(logs, "LOGGERS", ("caesura.test",))
    log = Log("caesura.test")
    monkeypatch.setattr(log.logger, "propagate", False)  # pytest's own handler wants arguments that fit
    # Libraries that configure logging switch loggers off that they do not know.
    monkeypatch.setattr(log.logger, "disabled", False)
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    log.logger.setLevel(logging.DEBUG)
    yield log
    log.logger.removeHandler(log.handler)


def test_a_record_is_one_line_whatever_is_in_it(log: Log) -> None:
    configure(JSON, "ingress")
    log.logger.warning("two\nlines, %s and %s", "\ud800", {"a": 1})
    try:
        raise ValueError("why")
    except ValueError:
        log.logger.exception("it failed")
    log.logger.error("%d of %s", "one")  # noqa: PLE1206 - on purpose
    first, second, third = log.lines()
    assert (first["message"], first["level"], first["logger"]) == (
        "two\nlines, \ud800 and {'a': 1}",
        "WARNING",
        "caesura.test",
    )
    assert (first["part"], first["time"][10], first["time"][-6:]) == ("ingress", "T", "+00:00")
    assert second["exception"].endswith("ValueError: why") and "exception" not in first
    assert third["message"].startswith("%d of %s")


async def test_ids_stay_with_the_work_and_what_it_starts(log: Log) -> None:
    configure(JSON, "replica")

    async def later(what: str) -> None:
        await asyncio.sleep(0)
        log.logger.warning(what)

    async def request(program: str | None, number: str) -> None:
        bind(program=program, request=number)
        await asyncio.create_task(later(number))
        bind(turn=2)
        log.logger.warning(number)

    await asyncio.gather(request("default/a", "r1"), request(None, "r2"))
    log.logger.warning("nobody's")
    told = [(line["message"], line.get("program"), line.get("request"), line.get("turn")) for line in log.lines()]
    assert sorted(told[:4], key=str) == [
        ("r1", "default/a", "r1", 2),
        ("r1", "default/a", "r1", None),
        ("r2", None, "r2", 2),
        ("r2", None, "r2", None),
    ]
    assert told[4] == ("nobody's", None, None, None)


def test_text_is_left_as_it_is(log: Log) -> None:
    configure(LogsConfig(), "ingress")
    log.logger.warning("plain")
    log.handler.flush()
    assert log.out.getvalue() == "plain\n"


def test_a_process_without_the_configuration_goes_by_the_environment(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    configure_from_environment("tools")
    log.logger.warning("said")
    assert [(line["part"], line["message"]) for line in log.lines()] == [("tools", "said")]
