"""Predictors as the configuration wants them: from a bundle, and learning on from there."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import ConfigError
from predictor_service.bundle import Origin, StoredModel
from predictor_service.client import prediction_client
from predictor_service.distribution import LENGTH_EDGES, Distribution
from predictor_service.model import TurnContext, TurnOutcome, TurnSeen
from predictor_service.shared import Trained
from predictor_service.statistics_model import StatisticsModel

TURN = TurnContext(source="t")


@pytest.fixture
def bundle(tmp_path: Path) -> str:
    model = StatisticsModel()
    for _ in range(100):
        model.turn_ended(TURN, TurnOutcome(1000, "look"))
    StoredModel("statistics", model, Origin("0" * 64, 1, ("t",))).save(tmp_path / "bundle")
    return str(tmp_path / "bundle")


def config(**section: object) -> CaesuraConfig:
    return CaesuraConfig.model_validate({"predictor": section, "redis": {"url": "redis://127.0.0.1:1"}})


def test_a_predictor_begins_with_what_the_bundle_knows_and_learns_on(bundle: str) -> None:
    predictor = Trained.of(bundle).predictor()
    before = predictor.predict([TURN])[0].output_tokens
    assert before == pytest.approx(1000, rel=0.15)
    predictor.learn([TurnSeen(TURN, TurnOutcome(10, "look"))] * 300)
    assert predictor.predict([TURN])[0].output_tokens < 500
    fresh = Trained.of(bundle).predictor()
    fresh.replace_others([predictor.to_bytes()])
    assert fresh.predict([TURN]) == predictor.predict([TURN])  # the bundle's own is counted once


class Long:
    """A trained model that expects many tokens."""

    def lengths(self, turns: Sequence[TurnContext]) -> list[Distribution]:
        counts = np.zeros(len(LENGTH_EDGES) - 1)
        counts[-1] = 1.0
        return [Distribution.of_counts(LENGTH_EDGES, counts) for _ in turns]


async def test_a_new_bundle_is_not_corrected_by_the_errors_of_the_one_before(bundle: str) -> None:
    old = replace(Trained.of(bundle), model=Long()).predictor()
    old.learn([TurnSeen(TURN, TurnOutcome(10, "look"))] * 300)
    same = replace(Trained.of(bundle), model=Long()).predictor()
    same.replace_others([old.to_bytes()])
    assert same.length_drift.ratios() == old.length_drift.ratios() != {}
    ingress = prediction_client(config(mode="service", bundle=bundle), ManualClock(), "w", None)
    assert ingress is not None
    ingress._local.predictor.replace_others([old.to_bytes()])
    assert ingress.view()["local"]["length_drift"] == old.length_drift.ratios(), "operators see it at an ingress"
    await ingress.aclose()
    StoredModel("statistics", StatisticsModel(), Origin("1" * 64, 2, ("t",))).save(Path(bundle))
    new = replace(Trained.of(bundle), model=Long()).predictor()
    new.replace_others([old.to_bytes()])
    assert new.length_drift.ratios() == {}


def test_without_a_bundle_it_begins_with_nothing() -> None:
    assert Trained.of(None).predictor().predict([TURN])[0].output_tokens < 500


def test_a_damaged_bundle_is_refused_by_name(bundle: str) -> None:
    (file,) = [one for one in Path(bundle).iterdir() if one.suffix == ".msgpack"]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=file.name):
        Trained.of(bundle)


async def test_an_ingress_s_own_statistics_begin_with_the_bundle_s(bundle: str) -> None:
    client = prediction_client(config(mode="statistics", bundle=bundle), ManualClock(), "w", None)
    assert client is not None
    forecast = await client.predict(TURN)
    assert forecast is not None
    assert forecast.output_tokens == pytest.approx(1000, rel=0.15)
    await client.aclose()
    assert prediction_client(config(mode="none"), ManualClock(), "w", None) is None


def test_a_bundle_that_nobody_would_use_is_refused() -> None:
    with pytest.raises(ValidationError, match="bundle"):
        config(mode="none", bundle="somewhere")
