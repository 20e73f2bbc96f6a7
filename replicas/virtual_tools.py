"""The tools that the outputs of a virtual engine call: each call is one token, which the scheduler reads at the end."""

from collections.abc import Sequence


class VirtualTools:
    """Writes and reads calls. A call is the token after all others by the index of its tool.

    Args:
        first_token: the first id of a call.
    """

    parser_failures = 0
    """See `replicas.turns.ToolNames`."""

    def __init__(self, first_token: int) -> None:
        self._first_token = first_token
        self._names: list[str] = []
        self._calls: dict[str, int] = {}

    def plan(self, request_id: str, tool: str) -> None:
        """The last token of a request's output will call ``tool``."""
        if tool not in self._names:
            self._names.append(tool)
        self._calls[request_id] = self._first_token + self._names.index(tool)

    def take(self, request_id: str) -> int | None:
        """Return the last token of a request's output; None: it calls nothing."""
        return self._calls.pop(request_id, None)

    def __call__(self, output_token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the tool that an output calls, if it does."""
        index = output_token_ids[-1] - self._first_token if output_token_ids else -1
        return (self._names[index],) if 0 <= index < len(self._names) else ()
