"""Has a call run by a pool, and says so; the test kills it then."""

import asyncio
import sys

import msgspec
import ray

from cluster.config.tools import ToolsConfig
from cluster.core.tools import ToolCall
from tools_runtime.actor import ToolActors


async def main(address: str, namespace: str, config: str, call: str) -> None:
    ray.init(address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    pool = ToolActors(ToolsConfig.model_validate_json(config))
    await pool.ready()
    print("ready", flush=True)
    await pool.run(msgspec.json.decode(call, type=ToolCall))


asyncio.run(main(*sys.argv[1:]))
