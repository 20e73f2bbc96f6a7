"""preStop of a worker: gives its replicas to other nodes, and waits until nothing that serves is left here.

Ray Serve starts a draining node's replicas elsewhere first; then those here end, each after the turns it has begun.
Where they are drained by Ray already, or the head is away, the waiting is all that is done.

Argument: seconds to wait at most.
"""

import subprocess
import sys
import time
from pathlib import Path

SERVES = (b"ServeReplica", b"SERVE_REPLICA", b"ProxyActor", b"SERVE_PROXY_ACTOR")
"""What is in the title of an actor that serves: its class while a method runs, else the name that it was given."""
RAYLET, NODE_ID = b"raylet", b"--node_id="
ATTEMPT_S, POLL_S = 20.0, 1.0


def commands(proc: Path = Path("/proc")) -> list[list[bytes]]:
    """Command lines of this pod's processes."""
    return [command_of(entry).split(b"\0") for entry in proc.iterdir() if entry.name.isdigit()]


def serving(proc: Path = Path("/proc")) -> int:
    """Processes of this pod that serve: replicas, and the HTTP proxy."""
    titles = [words[0] for words in commands(proc)]
    return sum(title.startswith(b"ray::") and any(name in title for name in SERVES) for title in titles)


def node(proc: Path = Path("/proc")) -> str | None:
    """The pod's node in the Ray cluster, as its raylet says. None: no raylet runs here (any more)."""
    for words in commands(proc):
        if words[0].rpartition(b"/")[2] == RAYLET:
            return next((word.removeprefix(NODE_ID).decode() for word in words if word.startswith(NODE_ID)), None)
    return None


def command_of(entry: Path) -> bytes:
    """Empty if it has ended."""
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def drained(node_id: str, left_s: float) -> bool:
    """Whether the cluster has taken the order to drain this node.

    It gets no deadline: with one, Serve stops a replica before another is ready if its longest turn could not end.
    """
    command = ["ray", "drain-node", f"--node-id={node_id}", "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "pod ends"]
    try:
        return subprocess.run(command, check=False, timeout=min(ATTEMPT_S, left_s)).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main(wait_s: float) -> None:
    """Order Ray to drain this node, and return once no replica is on it.

    Args:
        wait_s: longest time in seconds. After it, the pod ends with the replicas that are left.
    """
    end_s = time.monotonic() + wait_s
    ordered = False
    while (left_s := end_s - time.monotonic()) > 0 and serving():
        if not ordered and (node_id := node()) is not None:
            ordered = drained(node_id, left_s)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(float(sys.argv[1]))
