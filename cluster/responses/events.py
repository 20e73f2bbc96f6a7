"""A run's log as the events of OpenAI's response stream, numbered: the same for whoever reads the same log.

An item grows as its turn generates. Text ends where something else begins; a call ends only with its turn, because
until then the turn may be lost and tried again, and a client may run what it has seen complete. What a lost attempt
has said stays in the output, since clients count items by their place: it is `incomplete`, and the next attempt begins
new items.
"""

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseQueuedEvent,
    ResponseStreamEvent,
)

from cluster.errors import IllegalTransition
from cluster.responses.growth import Growth
from cluster.responses.snapshot import response, unchanging
from cluster.run import RunState, begin, step
from cluster.run_events import (
    Accepted,
    Ended,
    Generated,
    LateAnswer,
    RunEvent,
    TakenOver,
    ToolAnswer,
    ToolIntent,
    TurnIntent,
    TurnResult,
)

LAST_EVENTS = {
    "completed": ResponseCompletedEvent,
    "incomplete": ResponseIncompleteEvent,
    "failed": ResponseFailedEvent,
    # OpenAI's stream has no event for it; the response in this one has the status cancelled.
    "cancelled": ResponseIncompleteEvent,
}
LAST_TYPES = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.incomplete",
}


class ResponseFold:
    """Folds a log, entry by entry."""

    def __init__(self) -> None:
        self._state: RunState | None = None
        self._base: Response | None = None
        self._begun = False
        self._growth = Growth("", ())

    @property
    def state(self) -> RunState:
        """Of the run.

        Raises:
            IllegalTransition: nothing was fed.
        """
        if self._state is None:
            raise IllegalTransition("the log of this response is empty")
        return self._state

    @property
    def response(self) -> Response:
        """As it stands; an object of its own.

        Raises:
            IllegalTransition: nothing was fed.
        """
        state = self.state
        assert self._base is not None
        return response(self._base, state, self._begun, self._growth.models())

    def feed(self, event: RunEvent) -> list[ResponseStreamEvent]:
        """What a client is told of ``event``.

        Raises:
            IllegalTransition: it cannot follow what was fed.
        """
        if self._state is None:
            return self._accept(event)
        before = self._state
        self._state = step(before, event)
        told: list[ResponseStreamEvent] = []
        if not self._begun and not isinstance(event, Ended):
            told += self._begin()
        match event:
            case TurnIntent():
                self._growth.lose_attempt()
            case Generated():
                self._generated(event)
            case TurnResult():
                self._growth.finish_turn(event)
            case ToolIntent():
                self._growth.begin_approved(call for call in before.calls if call.place in event.places)
            case ToolAnswer():
                self._growth.begin_approved(call for call in before.calls if call.place == event.place)
                self._growth.answered(event)
            case LateAnswer():
                self._growth.answered(event.answer)
            case Ended():
                self._growth.end()
                self._growth.emit(LAST_EVENTS[event.status], type=LAST_TYPES[event.status], response=self.response)
            case TakenOver() | Accepted():
                pass
        return told + self._growth.take()

    def _accept(self, event: RunEvent) -> list[ResponseStreamEvent]:
        self._state = begin(event)
        spec = self._state.spec
        self._base = unchanging(spec)
        self._growth = Growth(spec.id, spec.offers, tuple(spec.echo.get("approvals", ())))
        self._growth.emit(ResponseCreatedEvent, type="response.created", response=self.response)
        if spec.background:
            self._growth.emit(ResponseQueuedEvent, type="response.queued", response=self.response)
            return self._growth.take()
        return self._growth.take() + self._begin()

    def _begin(self) -> list[ResponseStreamEvent]:
        self._begun = True
        self._growth.emit(ResponseInProgressEvent, type="response.in_progress", response=self.response)
        for label in self.state.spec.echo.get("told_servers", ()):
            self._growth.list_tools(label)
        return self._growth.take()

    def _generated(self, event: Generated) -> None:
        if event.reasoning:
            self._growth.think(event.reasoning)
        if event.content:
            self._growth.say(event.content)
        for piece in event.calls:
            self._growth.call_piece(event.turn, piece)
