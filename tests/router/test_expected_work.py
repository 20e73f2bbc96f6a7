"""The work expected of a program: by the client's hints, then the prediction, then the replicas' means."""

from cluster.core.program import Hints, Prediction
from router.candidate import WorkloadEstimate, expected_work

WORKLOAD = WorkloadEstimate(output_tokens=100.0, new_tokens=200.0, program_turns=5.0, pause_s=8.0)
PREDICTED = Prediction(
    40.0, 90.0, pause_s=30.0, pause_p50_s=3.0, returned_tokens=60.0, later_tokens=800.0, later_turns=8
)


def test_a_forecast_comes_before_the_replicas_means() -> None:
    usual = expected_work(WORKLOAD, Hints(), 1000, 0, final=False)
    assert (usual.output_tokens, usual.later_turns, usual.pause_s) == (100.0, 4.0, 2.0)
    expected = expected_work(WORKLOAD, Hints(), 1000, 0, final=False, predicted=PREDICTED)
    assert (expected.output_tokens, expected.later_turns, expected.pause_s) == (40.0, 8.0, 3.0)
    assert expected.later_outputs + expected.later_turns * expected.new_tokens == 800.0


def test_a_hint_comes_before_a_forecast() -> None:
    hints = Hints(expected_output_tokens=7, expected_pause_s=0.5, expected_later_turns=2, expected_returned_tokens=10)
    expected = expected_work(WORKLOAD, hints, 1000, 0, final=False, predicted=PREDICTED)
    assert (expected.output_tokens, expected.later_turns, expected.pause_s) == (7.0, 2.0, 0.5)


def test_a_client_s_number_of_turns_does_not_go_with_a_forecast_s_tokens() -> None:
    expected = expected_work(WORKLOAD, Hints(expected_later_turns=0), 1000, 0, final=False, predicted=PREDICTED)
    assert expected.later_outputs == 0.0
    assert expected.context_tokens == 1000 + 40.0 / 2


def test_nothing_is_ahead_of_a_final_turn() -> None:
    expected = expected_work(WORKLOAD, Hints(), 1000, 3, final=True, predicted=PREDICTED)
    assert (expected.output_tokens, expected.later_turns, expected.pause_s) == (40.0, 0.0, 0.0)
