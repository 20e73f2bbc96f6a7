"""ParallelServer: one data parallel rank of a model, as Ray Serve LLM's DPServer starts it.

Ray schedules the ranks of a group together, gives each its rank and the group's address, and restarts the group as a
whole. Each rank is a replica of its own for the router, with its own scheduler and KV.
"""

from ray.llm._internal.serve.serving_patterns.data_parallel.dp_server import DPServer

from replicas.server import ProgramServer


class ParallelServer(ProgramServer, DPServer):  # type: ignore[misc]
    """A ProgramServer whose engine is a rank of a data parallel group."""
