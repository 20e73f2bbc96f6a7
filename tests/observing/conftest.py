"""What is recorded with Ray, per series."""

import pytest

from tests.observing.recorded import Recorded, recording


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return recording(monkeypatch)
