"""NIXL moves blocks of host memory between two processes over TCP, as vLLM's tier between peers uses it.

Caesura has no tier between peers yet (ADR 16). `pip install nixl` brings the package, which no test needs otherwise.
"""

import importlib.util
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the package nixl is not installed")

BLOCKS, BLOCK_BYTES = 8, 4096
WAIT_S = 240.0
"""Most of it is the import of vLLM on a busy machine."""


def transport(name: str) -> tuple[Any, bytearray]:
    """vLLM's data plane over blocks of zeros. Import it only in the process that uses it."""
    from vllm.v1.kv_offload.tiering.p2p.data.nixl import NixlTransport

    memory = bytearray(BLOCKS * BLOCK_BYTES)
    return NixlTransport(name, memoryview(memory).cast("B", (BLOCKS, BLOCK_BYTES))), memory


def send(to: Connection) -> None:
    """The process that has the KV: it writes its blocks 1 and 2 over the peer's blocks 5 and 6."""
    import os
    import time

    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    own, memory = transport("source")
    for block in range(BLOCKS):
        memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = bytes([block]) * BLOCK_BYTES
    own.add_remote_peer("peer", *to.recv())
    transfer = own.write_blocks("peer", [1, 2], [5, 6])
    deadline_s = time.monotonic() + WAIT_S
    while not (polled := own.poll()).done and not polled.failed and time.monotonic() < deadline_s:
        time.sleep(0.001)
    to.send((transfer, list(polled.done)))
    own.close()


def receive(to: Connection) -> None:
    """The process that needs it."""
    import os

    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    own, memory = transport("peer")
    to.send((own.get_agent_metadata(), own._base_addr, BLOCKS, BLOCK_BYTES))
    to.recv()
    to.send([memory[block * BLOCK_BYTES] for block in range(BLOCKS)])
    own.close()


def test_blocks_arrive_in_the_other_process() -> None:
    context = get_context("spawn")
    (here, source_end), (there, peer_end) = context.Pipe(), context.Pipe()
    processes = [context.Process(target=send, args=(source_end,)), context.Process(target=receive, args=(peer_end,))]
    for process in processes:
        process.start()
    try:
        assert there.poll(WAIT_S)
        here.send(there.recv())
        assert here.poll(WAIT_S)
        transfer, done = here.recv()
        assert done == [transfer]
        there.send("look")
        assert there.poll(WAIT_S)
        assert there.recv() == [0, 0, 0, 0, 0, 1, 2, 0]
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
