"""Ids of a response and of its items. An item's id follows from the log: all readers give the same."""

from cluster.run_events import Call

RESPONSE_PREFIX = "resp_"


def stem(run_id: str) -> str:
    """The part of a run's id that its items' ids share."""
    return run_id.removeprefix(RESPONSE_PREFIX)


def output_item_id(prefix: str, run_id: str, output_index: int) -> str:
    """Of an item of the output."""
    return f"{prefix}_{stem(run_id)}_{output_index:04d}"


def input_item_id(run_id: str, index: int) -> str:
    """Of an item of the input that came without one."""
    return f"in_{stem(run_id)}_{index:04d}"


def approval_request_id(run_id: str, call: Call) -> str:
    """Of the request for consent to ``call``: it says which call is meant."""
    return f"mcpr_{stem(run_id)}_t{call.turn}c{call.index}"
