"""Real CPU engines with a disk tier, in this process, as short programs use them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from cluster.config.models import DiskTierConfig
from cluster.config.schema import PolicyConfig
from cluster.core.program import WIRE_KEY, Hints, ProgramIdentity
from replicas.control import snapshot
from replicas.disk_tier.chunk_file import ChunkFiles
from replicas.disk_tier.tier import DiskTier
from replicas.disk_tier.value import Speed
from replicas.host_tier import fit_tiers, kv_transfer_config
from replicas.settings import SchedulerSettings

TIER_BYTES = 8 << 20
DISK_BYTES = 64 << 20
WAIT_S = 20.0
FAST_S = 1e-7
"""Seconds of a chunk on a disk that is faster than any computation."""
CONTEXT = [7 + i % 900 for i in range(300)]


class Failing(ChunkFiles):
    """Files of a volume that fails with an error number. Reads work if ``reads``."""

    def __init__(self, number: int, *, reads: bool = False) -> None:
        super().__init__(direct=False)
        self.number, self.reads = number, reads

    def write(self, path: Path, key: bytes, chunk: memoryview) -> None:
        raise OSError(self.number, "as the test wants")

    def read(self, path: Path, key: bytes, into: memoryview) -> None:
        if not self.reads:
            raise OSError(self.number, "as the test wants")
        super().read(path, key, into)


class Hanging(ChunkFiles):
    """Files of a volume that hangs until ``opened`` is set."""

    def __init__(self, opened: threading.Event) -> None:
        super().__init__(direct=False)
        self.opened = opened

    def read(self, path: Path, key: bytes, into: memoryview) -> None:
        self.opened.wait(20.0)
        super().read(path, key, into)

    def write(self, path: Path, key: bytes, chunk: memoryview) -> None:
        self.opened.wait(20.0)
        super().write(path, key, chunk)


class FixedSpeed(Speed):
    """A speed that is not measured. The built-in model computes faster than many disks read."""

    def measure(self, chunks: int, seconds: float) -> None:
        """Do nothing."""


@dataclass
class Engine:
    """An engine, and the turns on it."""

    engine: LLMEngine

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    @property
    def disk(self) -> DiskTier:
        disk: DiskTier = self.scheduler.swapping.disk.disk
        return disk

    def numbers(self) -> dict[str, Any]:
        return snapshot(self.scheduler)

    def turn(self, program: str, prompt: list[int], *, last: bool = False, salt: str | None = None) -> list[int]:
        """Run a turn of 20 tokens, and step until nothing moves any more."""
        identity = ProgramIdentity(
            program_id=program, last_turn=last, hints=Hints(expected_tool="ls", expected_pause_s=30.0)
        )
        params = SamplingParams(
            max_tokens=20,
            ignore_eos=True,
            temperature=0.0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={WIRE_KEY: identity.encode()},
        )
        prompt_of: Any = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        self.engine.add_request(f"{program}-{time.monotonic_ns()}", prompt_of, params)
        found: list[int] = []
        deadline_s = time.monotonic() + WAIT_S
        while not found:
            assert time.monotonic() < deadline_s, "the turn hangs"
            for output in self.engine.step():
                found = list(output.outputs[0].token_ids)
            if not self.scheduler.running:
                time.sleep(0.001)  # as vLLM does in its own process, for the threads that read
        self.settle()
        return found

    def settle(self) -> None:
        """Step until no chunk is being moved."""
        self.until(lambda: not self.scheduler.has_requests())

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline_s, self.numbers()
            self.engine.engine_core.engine_core.step_fn()
            self.disk.take_reports()
            time.sleep(0.002)

    def empty(self, *, disk: bool = False) -> None:
        """Forget all KV on the device and on the host, and on disk if ``disk``."""
        self.settle()
        assert self.scheduler.reset_prefix_cache(reset_connector=False)
        self.scheduler.swapping.cache.reset_cache()
        if disk:
            for program in list(self.disk.chunks.accounts):
                self.disk.forget(program)
            self.disk._janitor.wait()
            for file in self.files():
                file.unlink()
            self.disk.chunks.clear()

    def files(self) -> list[Path]:
        """Return the files of chunks, after all deletions."""
        self.disk._janitor.wait()
        return list(self.disk._slots.folder.glob("slot-*/*/*.kv"))

    def story(self, program: str) -> list[dict[str, Any]]:
        """Return the program's turns."""
        turns: list[dict[str, Any]] = self.scheduler.programs.to_public_dict(f"default/{program}")["turns"]
        return turns

    def second(self, program: str, first: list[int], **options: Any) -> list[int]:
        """Run the turn after one that has generated ``first``."""
        return self.turn(program, CONTEXT + first + [11] * 25, **options)


@contextmanager
def engine_on(
    path: Path, model: Path, *, replicas: int = 2, disk_bytes: int = DISK_BYTES, spec: str | None = None
) -> Iterator[Engine]:
    """Start an engine whose disk tier is in a folder.

    Args:
        path: the folder.
        model: the model.
        replicas: number of replicas that share the folder.
        disk_bytes: size of the disk tier.
        spec: class of `tests.contracts.disk_faults`, in place of TieredSpec.
    """
    transfers = kv_transfer_config(
        TIER_BYTES, replicas_here=replicas, disk=DiskTierConfig(path=str(path), bytes=disk_bytes)
    )
    if spec is not None:
        transfers["kv_connector_extra_config"] |= {"spec_module_path": "tests.contracts.disk_faults", "spec_name": spec}
    arguments = EngineArgs(
        model=str(model),
        max_model_len=4096,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=129,
        max_num_seqs=16,
        distributed_executor_backend="uni",
        scheduler_cls="replicas.control.AgentScheduler",
        kv_transfer_config=transfers,
        skip_tokenizer_init=True,
        additional_config=SchedulerSettings(policy=PolicyConfig(name="vllm")).additional_config(),
    )
    config = arguments.create_engine_config()
    fit_tiers(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        engine = Engine(LLMEngine.from_vllm_config(config))
    try:
        engine.disk.read_speed, engine.disk.write_speed = FixedSpeed(FAST_S), FixedSpeed(FAST_S)
        engine.until(lambda: engine.disk.writable or bool(engine.disk._stopped))
        yield engine
    finally:
        engine.engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()  # vLLM has one connector in a process
