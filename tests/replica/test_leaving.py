"""A replica that ends waits until its programs' contexts are on disk, and never for long."""

import asyncio
from typing import Any

from cluster.core.errors import ControlTimeout
from replicas.leaving import begin_leaving, written


def scheduler(*answers: bool | Exception) -> Any:
    """A scheduler that answers whether contexts are still being written; the last answer stays."""
    left = list(answers)

    async def call(operation: str) -> dict[str, Any]:
        assert operation == "leave"
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return {"leaves": answer}

    return call


def test_it_waits_for_the_last_context() -> None:
    assert asyncio.run(written(scheduler(True, True, False)))


def test_it_does_not_wait_for_a_volume_that_hangs() -> None:
    assert not asyncio.run(written(scheduler(True), limit_s=0.05))


def test_a_scheduler_that_does_not_answer_does_not_keep_it() -> None:
    asyncio.run(begin_leaving(scheduler(ControlTimeout("no answer"))))
    assert not asyncio.run(written(scheduler(ControlTimeout("no answer"))))
