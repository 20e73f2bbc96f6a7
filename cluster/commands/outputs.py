"""Where a run's results go."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Outputs:
    """None: not wanted."""

    json_lines: Path | None = None
    record: Path | None = None
    plots: Path | None = None
    """A folder."""

    def check(self) -> None:
        """Fail before a run of minutes, not after it.

        Raises:
            ConfigError: one of them cannot be written.
        """
        for flag, path in {"--json": self.json_lines, "--record": self.record}.items():
            if path is not None:
                _write(flag, path.touch)
        if self.plots is not None:
            plots = self.plots
            _write("--plots", lambda: plots.mkdir(parents=True, exist_ok=True))


def _write(flag: str, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(f"{flag}: {error}") from error
