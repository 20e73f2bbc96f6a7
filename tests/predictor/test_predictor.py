"""A predictor: what it says of turns, what it learns, and how a trained model and statistics go together."""

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from cluster.core.program import Prediction
from predictor_service.distribution import LENGTH_EDGES, Distribution, bin_of
from predictor_service.model import (
    NO_TOOL,
    Observation,
    PauseContext,
    PauseOutcome,
    PauseSeen,
    ProgramSeen,
    Remaining,
    TurnContext,
    TurnOutcome,
    TurnSeen,
)
from predictor_service.predictor import Predictor, readable
from predictor_service.statistics_model import StatisticsModel

START = TurnContext(source="t", position=0)
LATER = TurnContext(source="t", position=1, tools=("look",), outputs=(20,), durations_s=(2.0,), returned=(50,))


def program(look_s: float = 2.0, output: int = 20, source: str = "t") -> list[Observation]:
    """It looks, then ends."""
    start, later = replace(START, source=source), replace(LATER, source=source)
    return [
        TurnSeen(start, TurnOutcome(output, "look")),
        PauseSeen(PauseContext(start, "look", output), PauseOutcome(look_s, 50)),
        TurnSeen(later, TurnOutcome(200, NO_TOOL, last=True)),
        ProgramSeen((start, later), ((250, 1), (0, 0))),
    ]


def taught(times: int = 200) -> Predictor:
    predictor = Predictor(StatisticsModel())
    for _ in range(times):
        predictor.learn(program())
    return predictor


def at(value: float) -> Distribution:
    counts = np.zeros(len(LENGTH_EDGES) - 1)
    counts[bin_of(LENGTH_EDGES, np.array([value]))] = 1.0
    return Distribution.of_counts(LENGTH_EDGES, counts)


class Trained:
    """A trained model that always says the same."""

    def __init__(self, tokens: float) -> None:
        self._length = (
            at(tokens) if math.isfinite(tokens) else Distribution(LENGTH_EDGES, np.full(len(at(1).shares), tokens))
        )

    def lengths(self, turns: Sequence[TurnContext]) -> list[Distribution]:
        return [self._length for _ in turns]

    def remaining(self, turns: Sequence[TurnContext]) -> list[Remaining]:
        return [Remaining(self._length, 3.0) for _ in turns]


def test_what_happened_before_is_expected_again() -> None:
    start, later = taught().predict([START, LATER])
    assert start.output_tokens == pytest.approx(20, abs=8)
    assert start.tools[0].tool == "look"
    assert start.tools[0].share > 0.9
    assert start.tools[0].pause_s == pytest.approx(2.0, rel=0.2)
    assert start.pause_s == pytest.approx(2.0, rel=0.3)
    assert start.pause_p50_s == pytest.approx(2.0, rel=0.3)
    assert start.returned_tokens == pytest.approx(50, abs=12)
    assert start.later_tokens == pytest.approx(250, rel=0.3)
    assert start.later_turns == pytest.approx(1.0, abs=0.3)
    assert later.output_tokens == pytest.approx(200, rel=0.2)
    assert later.later_turns < 0.5
    assert later.pause_s < 0.2


def test_before_anything_was_seen_there_is_a_forecast_that_can_be_reckoned_with() -> None:
    (forecast,) = Predictor(StatisticsModel()).predict([START])
    assert 1 <= forecast.output_tokens < 1000
    assert forecast.later_turns < 20
    assert forecast.pause_s < 60


def test_no_question_no_answer() -> None:
    assert taught(1).predict([]) == []


@pytest.mark.parametrize(
    "turn",
    [
        TurnContext(),
        TurnContext(source="\ud800" * 300, text="\udfff" * 5000, tools=("\ud800",), offered=("x" * 10_000, "")),
        TurnContext(position=10**9, prompt_tokens=10**12, outputs=(10**12,) * 8, returned=(10**12,) * 8),
        TurnContext(tools=("",) * 8, durations_s=(float("nan"), float("inf"), None, -1.0), offered=("never seen",)),
    ],
)
def test_every_turn_has_a_forecast(turn: TurnContext) -> None:
    (forecast,) = taught(3).predict([turn])
    numbers = [forecast.output_tokens, forecast.pause_s, forecast.pause_p50_s, forecast.later_tokens]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)


def test_nonsense_is_counted_and_changes_nothing() -> None:
    predictor = taught(20)
    before = predictor.to_bytes()
    pause = PauseContext(START, "look")
    predictor.learn(
        [
            TurnSeen(START, TurnOutcome(-1, "look")),
            TurnSeen(START, TurnOutcome(float("nan"), "look")),  # type: ignore[arg-type]
            PauseSeen(pause, PauseOutcome(float("nan"))),
            PauseSeen(pause, PauseOutcome(float("inf"), 3)),
            PauseSeen(pause, PauseOutcome(1.0, -3)),
            ProgramSeen((START,), ((-1, 0),)),
            ProgramSeen((START,), ()),
        ]
    )
    assert predictor.nonsense == 7
    assert predictor.to_bytes() == before


def test_what_one_has_learnt_another_knows() -> None:
    one, other = taught(), Predictor(StatisticsModel())
    other.replace_others([one.to_bytes()])
    assert other.predict([START]) == one.predict([START])
    other.replace_others([])
    assert other.predict([START]) == Predictor(StatisticsModel()).predict([START])


def test_damage_is_refused_and_changes_nothing() -> None:
    one, other = taught(), Predictor(StatisticsModel())
    good = one.to_bytes()
    other.replace_others([good])
    damaged = bytearray(good)
    damaged[len(good) // 2] ^= 0xFF
    for data in (b"", b"\x93", good[:-9], bytes(damaged)):
        assert not readable(data)
        with pytest.raises(ValueError):
            other.replace_others([good, data])
    assert readable(good)
    assert other.predict([START]) == one.predict([START])


def test_a_trained_model_answers_what_it_can_and_statistics_the_rest() -> None:
    predictor = Predictor(StatisticsModel(), Trained(500.0))
    predictor.learn(program())
    (forecast,) = predictor.predict([START])
    assert forecast.output_tokens == pytest.approx(500, rel=0.15)
    assert forecast.later_turns == 3.0
    assert forecast.tools[0].tool == "look"


def test_a_trained_model_that_is_off_is_corrected_by_source() -> None:
    predictor = Predictor(StatisticsModel(), Trained(500.0))
    for _ in range(300):
        predictor.learn([TurnSeen(START, TurnOutcome(125, "look"))])
    drifted, other = predictor.predict([START, replace(START, source="other")])
    assert drifted.output_tokens == pytest.approx(125, rel=0.35)
    assert other.output_tokens == pytest.approx(500, rel=0.15)
    again = Predictor(StatisticsModel(), Trained(500.0))
    again.replace_others([predictor.to_bytes()])
    assert again.predict([START])[0].output_tokens == drifted.output_tokens


@pytest.mark.parametrize("bundle", ["old", "new", ""])
def test_the_drift_of_another_bundle_is_not_used_and_its_statistics_are(bundle: str) -> None:
    old = Predictor(StatisticsModel(), Trained(500.0), bundle="old")
    for _ in range(300):
        old.learn([TurnSeen(START, TurnOutcome(125, "look"))])
    other = Predictor(StatisticsModel(), Trained(500.0), bundle=bundle)
    other.replace_others([old.to_bytes()])
    assert (other.length_drift.ratios() == old.length_drift.ratios()) is (bundle == "old")
    assert bool(other.length_drift.ratios()) is (bundle == "old")
    (expected,), (named,) = old.predict([START])[0].tools, other.predict([START])[0].tools
    assert (named.tool, named.share) == (expected.tool, expected.share)


@pytest.mark.parametrize("bundle", ["", "new"])
def test_a_state_without_the_id_of_a_bundle_is_readable_and_its_drift_is_that_of_no_bundle(bundle: str) -> None:
    known = Predictor(StatisticsModel(), Trained(500.0))
    known.learn([TurnSeen(START, TurnOutcome(125, "look"))])
    data = msgspec.msgpack.encode(msgspec.msgpack.decode(known.to_bytes())[:-1])
    assert readable(data)
    other = Predictor(StatisticsModel(), Trained(500.0), bundle=bundle)
    other.replace_others([data])
    assert bool(other.length_drift.ratios()) is (bundle == "")


def test_a_damaged_drift_of_another_bundle_is_refused() -> None:
    version, statistics, *_ = msgspec.msgpack.decode(taught(1).to_bytes())
    rows = [([b"\xff"], 1.0, 0.0)]
    assert not readable(msgspec.msgpack.encode((version, statistics, rows, [], "other")))
    assert readable(msgspec.msgpack.encode((version, statistics, [], [], "other")))


def test_a_trained_model_that_answers_nonsense_is_not_believed() -> None:
    predictor = Predictor(StatisticsModel(), Trained(float("nan")))
    (forecast,) = predictor.predict([START])
    (expected,) = Predictor(StatisticsModel()).predict([START])
    assert forecast == expected
    assert isinstance(forecast, Prediction)
    assert predictor.broken > 0
