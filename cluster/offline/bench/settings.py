"""The settings of one run of `caesura bench`. All values are checked here, and an error names the flag."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from cluster.core.errors import ConfigError
from cluster.core.slo import Slo
from cluster.offline.bench.arrivals import Arrivals
from cluster.offline.bench.infercept import builtin_workload
from cluster.offline.bench.trace import programs_from_trace
from cluster.offline.bench.workload import Shaping, Workload

INFERCEPT = "infercept"
BUILTIN_PROGRAMS = 1200
"""Programs in the pool of the built-in workload: 200 of each type."""
MAX_PROGRAMS = 100_000
"""Programs of one block, at most. A larger number is taken for a typing error."""
AS_SERVED = "as-served"
"""Name in results of the server's own policy, if no policy is requested."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """One run: each policy in each of ``blocks`` blocks. All policies of a block get the same programs and arrivals."""

    url: str
    model: str | None = None
    """Id of the model; None uses the first one that the server lists."""
    trace: Path | None = None
    """Path of a trace file; None uses the workload named ``workload``."""
    workload: str = INFERCEPT
    missing_tool_s: float | None = None
    only_recorded: bool = False
    missing_tools_from: Path | None = None
    shaping: Shaping = field(default_factory=Shaping)
    policies: tuple[str, ...] = ()
    """Names of the policies; empty to keep the server's policy."""
    rate_per_s: float = 1.0
    """Mean number of programs that arrive in a second."""
    arrivals: str = "poisson"
    duration_s: float | None = 60.0
    """Seconds of arrivals in one block; None if ``count`` is set."""
    count: int | None = None
    """Number of programs of one block; None if ``duration_s`` is set."""
    warmup_s: float = 0.0
    """Seconds at the beginning of a block whose programs are run and reported, but not measured."""
    blocks: int = 1
    seed: int = 0
    slo: Slo = field(default_factory=Slo)
    turn_timeout_s: float = 600.0
    drain_s: float = 120.0
    """Seconds after a block's last arrival within which programs may end."""
    command: str = ""
    """The command line of this run, which is written to the results."""
    record: bool = False
    """Whether to sample the server's memory during the run."""

    def __post_init__(self) -> None:
        """Check all settings.

        Raises:
            ConfigError: a value is invalid; the message names the flag.
        """
        require(_is_http(self.url), "--url", self.url, "is not an http:// or https:// URL")
        require(self.workload == INFERCEPT, "--workload", self.workload, f"is unknown; there is: {INFERCEPT}")
        require_positive(
            {
                "--rate": self.rate_per_s,
                "--duration-s": self.duration_s,
                "--count": self.count,
                "--blocks": self.blocks,
                "--slo-ttft": self.slo.ttft_s,
                "--slo-tpot": self.slo.tpot_s,
                "--slo-e2e": self.slo.e2e_s,
                "--slo-norm": self.slo.normalized_latency_s,
                "--turn-timeout-s": self.turn_timeout_s,
            }
        )
        require_zero_or_more({"--warmup-s": self.warmup_s, "--drain-s": self.drain_s, "--seed": self.seed})
        check_shaping(self.shaping, self.missing_tool_s)
        check_missing(self.missing_tool_s, self.missing_tools_from, only_recorded=self.only_recorded)
        Arrivals.parse(self.arrivals, self.rate_per_s)
        require(len(set(self.policies)) == len(self.policies), "--policies", ",".join(self.policies), "repeats a name")
        if (self.count is None) == (self.duration_s is None):
            raise ConfigError("--count, --duration-s: give one of them")
        require(self.window_s > 0, "--warmup-s", self.warmup_s, "leaves nothing to measure")
        programs = self.count if self.count is not None else self.rate_per_s * (self.duration_s or 0.0)
        flag = "--count" if self.count is not None else "--rate"
        require(programs <= MAX_PROGRAMS, flag, programs, f"programs in a block: {MAX_PROGRAMS} at most")

    @property
    def process(self) -> Arrivals:
        """Return the process that ``arrivals`` names, at the mean rate ``rate_per_s``."""
        return Arrivals.parse(self.arrivals, self.rate_per_s)

    @property
    def window_s(self) -> float:
        """Measured seconds of one block: the seconds of its arrivals, without the warm-up.

        For a fixed count, these are the seconds in which so many programs arrive on average.
        """
        span_s = self.duration_s if self.duration_s is not None else (self.count or 0) / self.rate_per_s
        return span_s - self.warmup_s

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names of the policies in the results."""
        return self.policies or (AS_SERVED,)

    def load(self) -> Workload:
        """Load the pool of programs.

        Raises:
            TraceError: the trace file cannot be used.
            ConfigError: no program fits.
        """
        traced = (self.trace, self.missing_tool_s, self.only_recorded, self.missing_tools_from)
        return load_pool(*traced, self.shaping, self.seed, "--max-context")


@lru_cache(maxsize=4)
def _recorded(
    trace: Path | None, missing_tool_s: float | None, only_recorded: bool, tools_from: Path | None, seed: int
) -> Workload:
    if trace is None:
        return builtin_workload(seed, BUILTIN_PROGRAMS)
    return programs_from_trace(trace, missing_tool_s, only_recorded, tools_from)


def load_pool(
    trace: Path | None,
    missing_tool_s: float | None,
    only_recorded: bool,
    missing_tools_from: Path | None,
    shaping: Shaping,
    seed: int,
    flags: str,
    names: Container[str] | None = None,
) -> Workload:
    """Load the programs of a trace or of the built-in workload, and shape them.

    Args:
        trace: the trace; None: the built-in workload.
        missing_tool_s: seconds of a tool whose duration was not recorded; None rejects such a program.
        only_recorded: omits the programs with a duration that was not recorded.
        missing_tools_from: a trace of whose durations those that were not recorded are drawn.
        shaping: how programs are shaped.
        seed: seed of the built-in workload and of the order.
        flags: the flags that decide which programs fit.
        names: the ids of the programs that have a forecast; others are left out. None: all programs.

    Raises:
        TraceError: the trace file cannot be used.
        ConfigError: no program fits, in which case the message names ``flags``, or none has a forecast.
    """
    recorded = _recorded(trace, missing_tool_s, only_recorded, missing_tools_from, seed)
    if names is not None:
        recorded = recorded.only(names)
        if not recorded.programs:
            raise ConfigError("--forecasts: there is a forecast for none of the trace's programs")
    kinds = {program.kind for program in recorded.programs}
    if unknown := set(shaping.categories) - kinds:
        known = ", ".join(sorted(kinds))
        raise ConfigError(f"--categories: there is no {', '.join(sorted(unknown))}; there are {known}")
    shaped = recorded.shaped(shaping, seed)
    if not shaped.programs and not shaped.dropped:
        raise ConfigError("--calls: no program has so many calls")
    if not shaped.programs:
        raise ConfigError(f"{flags}: none of {shaped.dropped} programs fits {shaping.max_context} tokens")
    return shaped


def check_shaping(shaping: Shaping, missing_tool_s: float | None) -> None:
    """Check how programs are to be shaped.

    Raises:
        ConfigError: a value is invalid; the message names the flag.
    """
    require_positive(
        {
            "--scale-lengths": shaping.scale_lengths,
            "--max-context": shaping.max_context,
            "--max-turns": shaping.max_turns,
            "--limit": shaping.limit,
            "--repeat-turns": shaping.repeat_turns,
        }
    )
    require_zero_or_more({"--scale-tools": shaping.scale_tools, "--missing-tool-s": missing_tool_s})
    require(0 <= shaping.no_calls_share <= 1, "--no-calls-share", shaping.no_calls_share, "must be from 0 to 1")
    if shaping.calls is not None and not 0 <= shaping.calls[0] <= shaping.calls[1]:
        raise ConfigError(f"--calls: {shaping.calls[0]}-{shaping.calls[1]} is not a number, or MIN-MAX")


def check_missing(tool_s: float | None, tools_from: Path | None, *, only_recorded: bool) -> None:
    """Check what stands for tool durations that a trace lacks.

    Raises:
        ConfigError: several things do; the message names the flags.
    """
    if (tool_s is not None) + (tools_from is not None) + only_recorded > 1:
        raise ConfigError("--missing-tool-s, --missing-tools-from, --only-recorded: give one of them")


def listed(text: str) -> tuple[str, ...]:
    """Return the names in a text that has commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def read_calls(text: str | None) -> tuple[int, int] | None:
    """Read ``N`` or ``MIN-MAX``. None stays None.

    Raises:
        ConfigError: the text has another form.
    """
    if text is None:
        return None
    first, dash, second = text.partition("-")
    if not first.isdecimal() or not (second.isdecimal() if dash else True):
        raise ConfigError(f"--calls: {text!r} is not a number, or MIN-MAX")
    return int(first), int(second if dash else first)


def require_positive(values: Mapping[str, float | None]) -> None:
    """Raise ConfigError unless each value is None or more than 0. Keys of ``values`` are flags."""
    for flag, value in values.items():
        require(value is None or 0 < value < float("inf"), flag, value, "must be more than 0, and finite")


def require_zero_or_more(values: Mapping[str, float | None]) -> None:
    """Raise ConfigError unless each value is None, 0 or more. Keys of ``values`` are flags."""
    for flag, value in values.items():
        require(value is None or 0 <= value < float("inf"), flag, value, "must be 0 or more, and finite")


def require(holds: bool, flag: str, value: object, message: str) -> None:
    """Raise ConfigError, with the flag and its value, unless ``holds``."""
    if not holds:
        raise ConfigError(f"{flag}: {value} {message}")


def _is_http(url: str) -> bool:
    try:
        scheme, host = urlsplit(url)[:2]
    except ValueError:
        return False
    return scheme in ("http", "https") and host != ""
