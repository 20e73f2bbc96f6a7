"""Weights that are changed under turns of the real CPU engine, and the pause of all generation."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from starlette.datastructures import State
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.api_server import init_app_state
from vllm.v1.engine.async_llm import AsyncLLM

from cluster.config.schema import PolicyConfig
from cluster.core.errors import BadRequest, UpstreamFailed
from cluster.core.program import ProgramIdentity
from cluster.core.stream import StreamChunk, joined
from cluster.core.turn import ID_BYTES, unpack_ids
from cluster.core.turn_tokens import TurnTokens, WeightSpan, unpack_logprobs
from cluster.store.weights import WeightsTarget
from replicas.control import ControlChannel
from replicas.engine import ReplicaEngine
from replicas.host_tier import kv_transfer_config
from replicas.requests import attach_program, parse_request
from replicas.resumption import Watch, events
from replicas.settings import SchedulerSettings
from replicas.tiny.model import write_tiny_model
from replicas.weights import ReplicaWeights

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PROMPT = list(range(40, 140))
TOKENS = 200
TIER_BYTES = 8 << 20


class Replica:
    """The engine's part of a ProgramServer with its weights, without Ray Serve around it."""

    def __init__(self, client: AsyncLLM, state: State, model: Path) -> None:
        self.client = client
        self.engine = ReplicaEngine.__new__(ReplicaEngine)
        self.engine._engine_client = client
        self.engine._oai_serving_chat = state.openai_serving_chat
        self.engine._oai_serving_completion = state.openai_serving_completion
        self.engine._serving_tokens = state.serving_tokens
        self.engine.watch_streams()
        self.channel = ControlChannel(client, 60.0)
        self.failures = 0
        self.weights = ReplicaWeights(str(model), 120.0, self._failed)
        self.weights.open(self.engine, self.channel.call, self.engine.streams)
        self.number = 0
        self.came = 0
        """Number of tokens of all streams."""

    def _failed(self) -> None:
        self.failures += 1

    async def tokens(self, prompt: list[int] = PROMPT, program: str | None = None, **sampling: Any) -> TurnTokens:
        """The recorded tokens of a whole stream."""
        self.number += 1
        headers = {"x-request-id": f"request-{self.number}"}
        asked = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, **sampling}
        request = parse_request("generate", {"model": "tiny", "prompt": prompt, "stream": True, **asked})
        identity = ProgramIdentity(program)
        attach_program(request, headers, identity.key, identity.encode())
        watch = Watch(record=True, version=self.weights.version)
        pieces = []
        with self.engine.streams.watching(request, watch):
            async for piece in events(self.engine.generate(request, RawRequestInfo(headers=headers)), watch):
                assert isinstance(piece, StreamChunk), piece
                pieces.append(piece)
                self.came += len(piece.progress.token_ids) // ID_BYTES
        record = joined(piece.progress for piece in pieces).record
        assert record is not None
        return record

    async def wait_for(self, tokens: int) -> None:
        """Wait until the streams have so many tokens more."""
        until = self.came + tokens
        while self.came < until:  # noqa: ASYNC110 - tokens have no event
            await asyncio.sleep(0.001)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "other"
    write_tiny_model(folder, seed=1)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(tiny_model: Path) -> AsyncIterator[Replica]:
    settings = SchedulerSettings(policy=PolicyConfig(name="caesura"), tool_parser="hermes")
    arguments = AsyncEngineArgs(
        model=str(tiny_model),
        served_model_name=["tiny"],
        max_model_len=4096,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=129,
        max_num_seqs=8,
        distributed_executor_backend="uni",
        scheduler_cls="replicas.control.AgentScheduler",
        kv_transfer_config=kv_transfer_config(TIER_BYTES),
        additional_config=settings.additional_config(),
    )
    front = FrontendArgs(enable_prompt_tokens_details=True)
    client = AsyncLLM.from_vllm_config(arguments.create_engine_config())
    state = State()
    await init_app_state(client, state, Namespace(**(vars(front) | vars(arguments))), ("generate",))
    yield Replica(client, state, tiny_model)
    client.shutdown()


def output(tokens: TurnTokens) -> tuple[list[int], list[float], tuple[WeightSpan, ...]]:
    [answer] = tokens.answers
    return unpack_ids(answer.token_ids), unpack_logprobs(answer.logprobs), answer.weights


def check_same(one: TurnTokens, other: TurnTokens) -> None:
    """The same tokens, with the same log probabilities up to the order of computation."""
    (ids, logprobs, _), (other_ids, others, _) = output(one), output(other)
    assert ids == other_ids
    assert logprobs == pytest.approx(others, abs=1e-3)


async def test_a_turn_goes_on_with_new_weights_and_computes_its_context_with_them(
    replica: Replica, tiny_model: Path, other_weights: Path
) -> None:
    ids, logprobs, weights = output(await replica.tokens(program="p"))
    assert weights == (WeightSpan(0, "default"),)
    assert len(ids) == TOKENS

    under_way = [asyncio.create_task(replica.tokens(program=f"p{number}")) for number in range(3)]
    await replica.wait_for(10)
    await replica.weights.follow(WeightsTarget("other", str(other_weights)))
    for turn in under_way:
        [answer] = (await turn).answers
        mixed, scores = unpack_ids(answer.token_ids), unpack_logprobs(answer.logprobs)
        assert [span.version for span in answer.weights] == ["default", "other"]
        change = answer.weights[1].start
        assert 0 < change < TOKENS
        assert mixed[:change] == ids[:change]
        assert scores[:change] == pytest.approx(logprobs[:change], abs=1e-3)
        # What the new weights make of the same context, computed anew: nothing of the old KV is left.
        rest = await replica.tokens(PROMPT + mixed[:change], max_tokens=TOKENS - change, cache_salt="cold")
        assert output(rest)[0] == mixed[change:]
        assert output(rest)[1] == pytest.approx(scores[change:], abs=1e-3)


async def test_nothing_that_other_weights_computed_is_found(
    replica: Replica, tiny_model: Path, other_weights: Path
) -> None:
    first, other = WeightsTarget("first", str(tiny_model)), WeightsTarget("other", str(other_weights))
    await replica.weights.follow(first)
    before = await replica.tokens(program="q")
    check_same(await replica.tokens(program="q"), before)
    await replica.weights.follow(other)
    warm = await replica.tokens(program="q")
    check_same(warm, await replica.tokens(cache_salt="cold"))
    assert output(warm)[0] != output(before)[0]
    await replica.weights.follow(first)
    check_same(await replica.tokens(program="q"), before)


async def test_a_pause_stops_turns_and_loses_nothing(replica: Replica, tiny_model: Path) -> None:
    await replica.weights.follow(WeightsTarget("first", str(tiny_model)))
    expected = await replica.tokens()
    turn = asyncio.create_task(replica.tokens())
    await replica.wait_for(5)
    await replica.weights.follow(WeightsTarget("first", str(tiny_model), paused=True))
    stopped = replica.came
    new = asyncio.create_task(replica.tokens())  # one that comes meanwhile waits too
    await asyncio.sleep(0.3)
    assert replica.came == stopped
    assert not new.done()
    assert not turn.done()
    await replica.weights.follow(WeightsTarget("first", str(tiny_model)))
    check_same(await turn, expected)
    check_same(await new, expected)


async def test_weights_are_changed_in_a_pause_without_ending_it(
    replica: Replica, tiny_model: Path, other_weights: Path
) -> None:
    await replica.weights.follow(WeightsTarget("first", str(tiny_model), paused=True))
    turn = asyncio.create_task(replica.tokens())
    await replica.weights.follow(WeightsTarget("other", str(other_weights), paused=True))
    await asyncio.sleep(0.2)
    assert not turn.done()
    await replica.weights.follow(WeightsTarget("other", str(other_weights)))
    assert output(await turn)[2] == (WeightSpan(0, "other"),)


async def test_whole_answers_and_several_have_the_versions_too(
    replica: Replica, tiny_model: Path, other_weights: Path
) -> None:
    await replica.weights.follow(WeightsTarget("first", str(tiny_model)))
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0.9, "n": 2, "max_tokens": 400, "ignore_eos": True}
    request, watch = parse_request("completions", body), Watch(record=True, version="first")
    attach_program(request, {"x-request-id": "several"}, None, ProgramIdentity().encode())

    async def answer() -> None:
        with replica.engine.streams.watching(request, watch):
            async for _ in replica.engine.completions(request, RawRequestInfo(headers={"x-request-id": "several"})):
                pass

    turn = asyncio.create_task(answer())
    while (await replica.channel.call("exchange"))["snapshot"]["running"] < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await replica.weights.follow(WeightsTarget("other", str(other_weights)))
    await turn
    record = watch.take_record()
    assert record is not None
    assert len(record.answers) == 2
    for one in record.answers:
        assert [span.version for span in one.weights] == ["first", "other"]
        assert 0 <= one.weights[1].start < 400
        assert len(unpack_ids(one.token_ids)) == len(unpack_logprobs(one.logprobs)) == 400


async def test_a_folder_that_cannot_be_loaded_is_refused_before_anything_changes(
    replica: Replica, other_weights: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadRequest, match="no folder"):
        replica.weights.check(str(tmp_path / "nowhere"))
    with pytest.raises(BadRequest, match="has no"):
        replica.weights.check(str(tmp_path))
    whole = next(other_weights.glob("*.safetensors")).read_bytes()  # noqa: ASYNC240
    (tmp_path / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(BadRequest, match="not whole"):
        replica.weights.check(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(BadRequest, match="no safetensors"):
        replica.weights.check(str(tmp_path))
    assert replica.failures == 0


async def test_a_failed_load_ends_the_replica(
    replica: Replica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica.weights, "check", lambda path: None)  # the folder vanishes after the check
    with pytest.raises(UpstreamFailed, match="could not be loaded"):
        await replica.weights.follow(WeightsTarget("gone", str(tmp_path / "gone")))
    assert replica.failures == 1
    with pytest.raises(UpstreamFailed):
        await replica.weights.follow(WeightsTarget("gone", str(tmp_path / "gone")))
