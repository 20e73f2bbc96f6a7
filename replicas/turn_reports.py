"""What the scheduler reports of a turn beside its tokens: the time that its first token would take alone.

It goes from the engine to its client among the parameters of a KV transfer of the turn's first and last output, because
vLLM carries these and reads no unknown one. The client removes it before an answer is made. If the client joins the
first output with the next, vLLM keeps the parameters of the next only, and the report comes with the last output.
"""

from typing import Any

from vllm.outputs import RequestOutput

from replicas.turns import Turn

ALONE = "caesura_alone_s"


class TurnReports:
    """Reports that go with the outputs of the step that ends. Turns whose bound does not depend on it have none."""

    def __init__(self) -> None:
        self._alone_s: dict[str, float] = {}

    def note(self, request_id: str, turn: Turn) -> None:
        """Report the turn with its output of this step."""
        if turn.bounds.slowdown is not None:
            self._alone_s[request_id] = turn.alone_s

    def attached(self, outputs: Any) -> Any:
        """Add the reports to the outputs of a step, a mapping of clients to vLLM's EngineCoreOutputs, and return it."""
        if self._alone_s:
            for one in (one for of_client in outputs.values() for one in of_client.outputs):
                if (alone_s := self._alone_s.get(one.request_id)) is not None:
                    one.kv_transfer_params = {**(one.kv_transfer_params or {}), ALONE: alone_s}
            self._alone_s.clear()
        return outputs


def take_alone_s(output: RequestOutput) -> float | None:
    """Remove the report from an output of the engine. Return its seconds; None: it has no report."""
    if not output.kv_transfer_params or ALONE not in output.kv_transfer_params:
        return None
    others = dict(output.kv_transfer_params)
    alone_s = float(others.pop(ALONE))
    output.kv_transfer_params = others or None
    return alone_s
