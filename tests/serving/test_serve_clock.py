"""The controller's wall clock goes on when the machine's is set back, and follows it when it is set forward."""

import time

import pytest
from ray._common.utils import Timer
from ray.serve._private import deployment_state
from ray.serve._private.utils import call_function_from_import_path

from cluster.local.cluster import ENVIRONMENT
from cluster.local.serve_clock import NeverBack


def test_a_clock_that_is_set_back_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s, steady_s = 10_000.0, 50.0
    monkeypatch.setattr(time, "time", lambda: wall_s)
    monkeypatch.setattr(time, "monotonic", lambda: steady_s)
    clock, told = NeverBack(), []
    for wall_s, steady_s in [(10_001, 51), (6_401, 51), (6_411, 61), (13_000, 62), (13_001, 63)]:  # noqa: B007
        told.append(clock.time())
    assert told == [10_001, 10_001, 10_011, 13_000, 13_001]


def test_serve_is_told_to_go_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment_state, "time", time)  # both as they were, afterwards
    monkeypatch.setattr(Timer, "time", Timer.time)
    call_function_from_import_path(ENVIRONMENT["RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"])
    before_s = deployment_state.time.time()
    monkeypatch.setattr(time, "time", lambda: before_s - 3600)
    assert deployment_state.time.time() >= before_s
    assert Timer().time() >= before_s


def test_the_rest_of_the_module_is_as_it_was() -> None:
    assert NeverBack().perf_counter is time.perf_counter
