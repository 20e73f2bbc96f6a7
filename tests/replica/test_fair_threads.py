"""What the threads of a replica do with jobs that fail in unusual ways."""

import threading

import pytest

from replicas.fair_threads import FairThreads

TIMEOUT_S = 20


class Panic(BaseException):
    """As PyO3's PanicException, which a library in Rust raises where it fails."""


def no() -> object:
    raise ValueError("no")


def panics() -> object:
    raise Panic("index out of bounds")


def leaves() -> object:
    raise SystemExit(1)


@pytest.mark.parametrize("failing", [no, panics, leaves])
def test_no_job_ends_the_thread(failing: object) -> None:
    threads = FairThreads(1)
    failed = threads.submit("t", failing)  # type: ignore[arg-type]
    assert threads.submit("t", lambda: 3).result(TIMEOUT_S) == 3
    error = failed.exception(TIMEOUT_S)
    assert isinstance(error, Exception), "vLLM and our boundaries catch only these"
    if failing is no:
        assert isinstance(error, ValueError)
    else:
        assert isinstance(error.__cause__, (Panic, SystemExit))
        assert repr(error.__cause__) in str(error)


@pytest.mark.parametrize("failing", [no, panics])
def test_a_job_whose_question_fails_has_its_error(failing: object) -> None:
    threads = FairThreads(1)
    done: list[int] = []
    failed = threads.submit("t", lambda: done.append(1), failing)  # type: ignore[arg-type]
    assert threads.submit("t", lambda: 3).result(TIMEOUT_S) == 3
    assert isinstance(failed.exception(TIMEOUT_S), Exception)
    assert not done


def test_an_unwanted_job_is_cancelled() -> None:
    threads = FairThreads(1)
    unwanted = threads.submit("t", no, lambda: True)
    assert threads.submit("t", lambda: 3).result(TIMEOUT_S) == 3
    assert unwanted.cancelled()


def test_spare_jobs_wait_for_all_others_and_their_tenants_take_turns() -> None:
    threads, begin, done = FairThreads(1), threading.Event(), list[str]()
    busy = threads.submit("a", lambda: begin.wait(TIMEOUT_S))
    for tenant in ("a", "a", "b"):
        threads.submit(tenant, lambda tenant=tenant: done.append(f"spare {tenant}"), is_spare=True)  # type: ignore[misc]
    for tenant in ("b", "b", "c"):
        threads.submit(tenant, lambda tenant=tenant: done.append(tenant))  # type: ignore[misc]
    last = threads.submit("a", lambda: done.append("spare a"), is_spare=True)
    begin.set()
    assert busy.result(TIMEOUT_S)
    last.result(TIMEOUT_S)
    assert done == ["b", "c", "b", "spare a", "spare b", "spare a", "spare a"]
