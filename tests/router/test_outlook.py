"""What the router expects of a program: its client's word, then the predictor's, then the replicas' means."""

from cluster.program import Forecasted, Hints
from router.outlook import Outlook, expect

OUTLOOK = Outlook(output_tokens=100.0, new_tokens=200.0, program_turns=5.0, pause_s=8.0)
FORESEEN = Forecasted(
    40.0, 90.0, pause_s=30.0, pause_p50_s=3.0, returned_tokens=60.0, later_tokens=800.0, later_turns=8
)


def test_a_forecast_comes_before_the_replicas_means() -> None:
    usual = expect(OUTLOOK, Hints(), 1000, 0, final=False)
    assert (usual.output_tokens, usual.later_turns, usual.pause_s) == (100.0, 4.0, 2.0)
    expected = expect(OUTLOOK, Hints(), 1000, 0, final=False, foreseen=FORESEEN)
    assert (expected.output_tokens, expected.later_turns, expected.pause_s) == (40.0, 8.0, 3.0)
    assert expected.later_outputs + expected.later_turns * expected.new_tokens == 800.0


def test_a_hint_comes_before_a_forecast() -> None:
    hints = Hints(expected_output_tokens=7, expected_pause_s=0.5, expected_later_turns=2, expected_returned_tokens=10)
    expected = expect(OUTLOOK, hints, 1000, 0, final=False, foreseen=FORESEEN)
    assert (expected.output_tokens, expected.later_turns, expected.pause_s) == (7.0, 2.0, 0.5)


def test_a_client_s_number_of_turns_does_not_go_with_a_forecast_s_tokens() -> None:
    expected = expect(OUTLOOK, Hints(expected_later_turns=0), 1000, 0, final=False, foreseen=FORESEEN)
    assert expected.later_outputs == 0.0
    assert expected.context_tokens == 1000 + 40.0 / 2


def test_nothing_is_ahead_of_a_final_turn() -> None:
    expected = expect(OUTLOOK, Hints(), 1000, 3, final=True, foreseen=FORESEEN)
    assert (expected.output_tokens, expected.later_turns, expected.pause_s) == (40.0, 0.0, 0.0)
