"""Long logs of responses are replayed in many steps of the event loop, and only those that are needed."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from cluster.core.clock import MonotonicClock
from cluster.http.conversations import Conversations
from cluster.http.stored_responses import StoredResponses, replayed
from cluster.responses.conversation_entries import Deleted, Entry, Responded, encode
from cluster.runs.events import Ended, Generated, RunEvent, Status, TurnIntent
from cluster.runs.runner import AT_ONCE, ProgramRunner
from cluster.store.conversations import ConversationStore, StoredConversation, Written
from tests.responses import run_logs

LOGS: Any = run_logs
PARTS = 20


def log(status: Status = "completed") -> list[RunEvent]:
    pieces = [Generated(1, "word ") for _ in range(PARTS * AT_ONCE)]
    result = LOGS.result(1, "word " * len(pieces))
    return [LOGS.accepted(store=True), TurnIntent(1), *pieces, result, Ended(status, at_s=105.0)]


class Logs:
    """A runner that has logs, of which it counts those that were loaded."""

    def __init__(self, **logs: list[RunEvent]) -> None:
        self._logs = logs
        self.loaded: list[str] = []
        self.prolonged: list[str] = []

    async def prolong(self, tenant: str, run_ids: Sequence[str], share: float) -> frozenset[str]:
        self.prolonged += run_ids
        return frozenset()

    async def load(self, run_id: str, tenant: str) -> Sequence[RunEvent] | None:
        self.loaded.append(run_id)
        return self._logs.get(run_id)


class Entries(ConversationStore):
    """A store with one conversation."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        url = "redis://127.0.0.1:1"
        super().__init__(url, timeout_s=1.0, retention_s=60.0, tenant_bytes=1024, clock=MonotonicClock())
        self._entries = tuple(map(encode, entries))

    async def load(self, tenant: str, name: str) -> StoredConversation | None:
        return StoredConversation(0.0, b"{}", self._entries)

    async def renewed(self, tenant: str, name: str, number: int, *, is_all: bool) -> Written:
        assert (number, is_all) == (len(self._entries), True)
        return Written.OK


class Turns:
    """Counts the steps of the event loop meanwhile."""

    def __init__(self) -> None:
        self.number = 0
        self._task = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.number += 1

    async def __aenter__(self) -> "Turns":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()


async def test_other_tasks_run_while_a_long_log_is_replayed() -> None:
    async with Turns() as turns:
        fold = await replayed(log())
    assert len(fold.response.output_text) == 5 * PARTS * AT_ONCE
    assert turns.number >= PARTS - 1


async def test_other_tasks_run_while_responses_are_found() -> None:
    logs: Any = Logs(one=log(), two=log())
    async with Turns() as turns:
        found = await StoredResponses(logs).found(["one", "gone", "two"], "default")
    assert sorted(found) == ["one", "two"]
    assert turns.number >= 2 * (PARTS - 1)


class Followed(ProgramRunner):
    """A runner that has all events of a run at once."""

    def __init__(self) -> None:
        """Nothing of it is needed."""

    async def _followed(self, run_id: str, start: int) -> AsyncGenerator[Sequence[RunEvent], None]:
        yield log()[start:]


async def test_other_tasks_run_while_a_long_log_is_followed() -> None:
    async with Turns() as turns:
        batches = [batch async for batch in Followed().follow("one", 1)]
    assert [event for batch in batches for event in batch] == log()[1:]
    assert len(batches) > PARTS and turns.number >= PARTS - 1


async def continued(logs: Logs, *entries: Entry) -> Any:
    runner: Any = logs
    conversations = Conversations(Entries(entries), StoredResponses(runner), lambda: False)
    return (await conversations.to_continue("default", "conv_1", "conversation")).continuation()


async def test_a_continuation_replays_the_last_response_that_counts() -> None:
    logs = Logs(first=log(), second=log(), third=log("failed"))
    previous, since = await continued(logs, Responded("first"), Responded("second"), Responded("third"))
    assert previous is not None and since == ()
    assert logs.loaded == ["third", "second"]
    assert logs.prolonged == ["first", "second", "third"]


async def test_a_continuation_after_a_deletion_replays_all_responses() -> None:
    logs = Logs(first=log(), second=log())
    previous, since = await continued(logs, Responded("first"), Responded("second"), Deleted("x"))
    assert previous is None and len(since) == 2
    assert sorted(logs.loaded) == ["first", "second"]
