"""`benchmarks.policy_sensitivity` changes the constant that it names, and no other."""

import pytest

from benchmarks.policy_sensitivity import CONSTANTS, compared
from replicas import load_shedding
from replicas.policies import caesura
from replicas.policies.caesura import CaesuraParameters


def constants() -> dict[str, float]:
    built = CaesuraParameters().build()
    order, budget, pause = built.order, built.budget, built.pause
    return {
        "turn_value": order.turn_value,  # type: ignore[attr-defined]
        "program_value": order.program_value,  # type: ignore[attr-defined]
        "max_wait_s": order.max_wait_s,  # type: ignore[attr-defined]
        "PROMPT_SHARE": budget.prompt_share,  # type: ignore[attr-defined]
        "PROMPT_SLOWDOWN": budget.prompt_slowdown,  # type: ignore[attr-defined]
        "HOLD_WORTH": pause.worth,  # type: ignore[attr-defined]
        "HINT_SLACK": caesura.HINT_SLACK,
        "STARVING": load_shedding.STARVING,
        "MAX_BACKLOG": load_shedding.MAX_BACKLOG,
    }


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_change_multiplies_its_constant_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = constants()
    assert before.keys() == CONSTANTS.keys()
    monkeypatch.setattr(CaesuraParameters, "build", CaesuraParameters.build)
    for module in (caesura, load_shedding):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, getattr(module, name))
    CONSTANTS[name](2.0)
    assert constants() == before | {name: 2 * before[name]}
    assert CaesuraParameters().build().max_wait_s == constants()["max_wait_s"]


def test_a_row_has_its_headlines_beside_those_without_a_change() -> None:
    plain = {"constant": "none", "rate_per_s": 2.0, "goodput_programs": 4.0, "completion_all_s.mean": 10.0}
    other = plain | {"rate_per_s": 3.0, "goodput_programs": 1.0}
    found = compared(plain | {"constant": "turn_value", "goodput_programs": 3.0}, [other, plain])
    assert (found["x goodput_programs"], found["x completion_all_s.mean"]) == (0.75, 1.0)
