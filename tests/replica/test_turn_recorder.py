"""The recorded tokens of a turn, and the versions of the weights that computed them."""

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.core.stream import Ending
from cluster.core.turn import pack_ids, unpack_ids
from cluster.core.turn_tokens import WeightSpan, unpack_logprobs
from replicas import turn_recorder
from replicas.resumption import Watch
from replicas.turn_recorder import TurnRecorder, WeightSpans


def logprobs(*values: tuple[int, float]) -> list[dict[int, Any]]:
    return [{token: SimpleNamespace(logprob=value)} for token, value in values]


def spans(before: tuple[WeightSpan, ...], known: int, *changes: tuple[int, str]) -> list[tuple[int, str]]:
    made = WeightSpans(before, known, "a")
    for tokens, version in changes:
        made.changed(tokens, version)
    return [(span.start, span.version) for span in made.spans]


def test_versions_of_the_weights() -> None:
    assert spans((), 0) == [(0, "a")]
    assert spans((), 0, (5, "b"), (9, "c")) == [(0, "a"), (5, "b"), (9, "c")]
    assert spans((), 0, (0, "b")) == [(0, "b")], "no token is of the first version"
    assert spans((), 0, (5, "b"), (5, "c")) == [(0, "a"), (5, "c")]
    assert spans((), 0, (5, "b"), (5, "a")) == [(0, "a")]
    assert spans((WeightSpan(0, "a"),), 7, (2, "b")) == [(0, "a"), (9, "b")], "it goes on with the same weights"
    assert spans((WeightSpan(0, "z"),), 7, (2, "b")) == [(0, "z"), (7, "a"), (9, "b")]


@pytest.mark.parametrize("is_delta", [True, False])
def test_the_tokens_of_all_answers(is_delta: bool) -> None:
    recorder = TurnRecorder([1, 2], 2, is_delta=is_delta)
    versions = [WeightSpans((), 0, "a"), WeightSpans((), 0, "a")]
    recorder.add(1, [8], logprobs((8, -0.25)), None)
    assert recorder.tokens(versions) is None
    second = ([9], logprobs((9, -0.5))) if is_delta else ([8, 9], logprobs((8, -0.25), (9, -0.5)))
    recorder.add(1, *second, Ending("length"))
    assert recorder.tokens(versions) is None, "one answer has not ended"
    recorder.add(0, [7], logprobs((7, -1.0)), Ending("stop", 7))
    tokens = recorder.tokens(versions)
    assert tokens is not None
    assert unpack_ids(tokens.prompt) == [1, 2]
    assert [unpack_ids(one.token_ids) for one in tokens.answers] == [[7], [8, 9]]
    assert [unpack_logprobs(one.logprobs) for one in tokens.answers] == [[-1.0], [-0.25, -0.5]]
    assert [(one.finish_reason, one.stop_reason) for one in tokens.answers] == [("stop", 7), ("length", None)]


def test_no_answer_is_packed_before_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be packed again at each event of the others."""
    packed: list[list[int]] = []
    monkeypatch.setattr(turn_recorder, "pack_ids", lambda ids: packed.append(list(ids)) or pack_ids(ids))
    recorder = TurnRecorder([1, 2], 2, is_delta=True)
    versions = [WeightSpans((), 0, "a"), WeightSpans((), 0, "a")]
    recorder.add(0, [7], logprobs((7, -1.0)), Ending("stop"))
    for token in range(10):
        recorder.add(1, [token], logprobs((token, -1.0)), None)
        assert recorder.tokens(versions) is None
    assert packed == []
    recorder.add(1, [10], logprobs((10, -1.0)), Ending("stop"))
    assert recorder.tokens(versions) is not None
    assert sorted(packed) == [[*range(11)], [1, 2], [7]]


def test_without_all_log_probabilities_there_is_no_record() -> None:
    recorder = TurnRecorder([1], 1, is_delta=True)
    recorder.add(0, [7, 8], logprobs((7, -1.0)), Ending("stop"))
    assert recorder.tokens([WeightSpans((), 0, "a")]) is None


def watch_of(answers: int, name: str = "request-1") -> Watch:
    watch = Watch(version="a")
    watch.name = name
    watch._weights = [WeightSpans((), 0, "a") for _ in range(answers)]
    return watch


def versions(watch: Watch) -> list[list[tuple[int, str]]]:
    return [[(span.start, span.version) for span in one.spans] for one in watch._weights]


def test_a_change_counts_from_the_token_that_the_engine_reports() -> None:
    watch = watch_of(1)
    watch.weights_changed("b", {"request-1-0a1b2c3d": 5, "request-10-0a1b2c3d": 9}, {"request-1"})
    assert versions(watch) == [[(0, "a"), (5, "b")]]
    several = watch_of(2)
    several.weights_changed("b", {"1_request-1-0a1b2c3d": 4}, {"request-1"})
    assert versions(several) == [[(0, "a")], [(0, "a"), (4, "b")]], "the first answer has ended in the engine"


def test_a_request_that_the_engine_has_not_got_has_the_new_weights_alone() -> None:
    watch = watch_of(1)
    watch.weights_changed("b", {"request-2-0a1b2c3d": 5}, {"request-2"})
    assert versions(watch) == [[(0, "b")]]
    ended = watch_of(1)
    ended._produced.add(0)
    ended.weights_changed("b", {}, set())
    assert versions(ended) == [[(0, "a")]]
    assert pack_ids([]) == b""
