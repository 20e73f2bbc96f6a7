"""When programs are meant to arrive: an open loop, which waits for nobody.

AugServe's workloads: W1 is ``poisson`` for a duration, W2 a fixed count, W3 ``gamma:CV`` for a duration.
"""

from dataclasses import dataclass

import numpy as np

from cluster.errors import ConfigError

POISSON = "poisson"
GAMMA = "gamma"
MAX_CV = 100.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A renewal process with Gamma-distributed gaps. CV 1 is the Poisson process; more is burstier."""

    rate_per_s: float
    cv: float = 1.0

    @classmethod
    def parse(cls, text: str, rate_per_s: float) -> "Arrivals":
        """``poisson`` or ``gamma:CV``.

        Raises:
            ConfigError: anything else.
        """
        name, _, parameter = text.partition(":")
        if name == POISSON and not parameter:
            return cls(rate_per_s)
        if name == GAMMA:
            try:
                cv = float(parameter)
            except ValueError:
                cv = 0.0
            if 0 < cv <= MAX_CV:
                return cls(rate_per_s, cv)
        raise ConfigError(
            f"--arrivals: {text!r} is neither {POISSON} nor {GAMMA}:CV with a CV above 0, up to {MAX_CV:g}"
        )

    def times_s(
        self, rng: np.random.Generator, *, count: int | None = None, duration_s: float | None = None
    ) -> list[float]:
        """Seconds from the start, ascending: the first ``count``, or all before ``duration_s``.

        Raises:
            ValueError: not exactly one of the two is given.
        """
        if (count is None) == (duration_s is None):
            raise ValueError("give either count or duration_s")
        if count is not None:
            return [float(time) for time in np.cumsum(self._gaps(rng, count))]
        times: list[float] = []
        now_s = float(self._gaps(rng, 1)[0])
        while duration_s is not None and now_s < duration_s:
            times.append(now_s)
            now_s += float(self._gaps(rng, 1)[0])
        return times

    def _gaps(self, rng: np.random.Generator, count: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
        return rng.gamma(1 / self.cv**2, self.cv**2 / self.rate_per_s, size=count)
