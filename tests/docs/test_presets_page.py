"""The presets page: costs and errors beside each preset."""

import pytest

from cluster.offline.reference.presets import presets_page
from replicas.presets import preset, preset_names


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return presets_page().splitlines()


def test_each_preset_has_a_line_with_its_memory_and_its_errors(lines: list[str]) -> None:
    for name in preset_names():
        (line,) = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert f"| {preset(name).kv_capacity_tokens:,} |" in line
    (line,) = [line for line in lines if line.startswith("| `llama-3.1-70b/h800` |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == "4"
    assert cells[6] == "h100"
    assert all(" to " in cell for cell in cells[7:10])


def test_a_model_that_nobody_measured_says_so(lines: list[str]) -> None:
    (line,) = [line for line in lines if line.startswith("| `gpt-j-6b/h100` |")]
    assert line.endswith("| h100, other models |  |  |  |")


def test_rows_of_other_sources_and_ranks_are_all_listed(lines: list[str]) -> None:
    others = [line for line in lines if line.startswith("| h100 |")]
    assert any("| aic-served |" in line for line in others)
    assert any("| aic | vllm 0.24.0 | llama-3.1-70b x8 | decode |" in line for line in others)
    assert not any("llama-3.1-70b x4 | decode" in line for line in others)
