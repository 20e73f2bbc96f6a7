"""The settings of one call of `caesura simulate`. All values are checked here, and an error names the flag."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from cluster.config.schema import PolicyConfig, SloConfig
from cluster.core.errors import ConfigError
from cluster.core.registry import BASED_PREDICTORS, PEERS, POLICIES, PREDICTORS
from cluster.core.slo import Slo
from cluster.offline.bench.arrivals import Arrivals
from cluster.offline.bench.settings import (
    MAX_PROGRAMS,
    check_missing,
    check_shaping,
    listed,
    require,
    require_positive,
    require_zero_or_more,
)
from cluster.offline.bench.workload import Shaping
from cluster.offline.simulator.disaggregated import Disaggregation
from cluster.offline.simulator.elastic import STATIC, Scaling
from cluster.offline.simulator.foresight import Reports
from cluster.offline.simulator.load import Burst
from cluster.offline.simulator.routers import LEAST_PROGRAMS, OURS, check_router, front_settings
from replicas.cost_model import CostModel
from replicas.presets import cost_model

if TYPE_CHECKING:
    from replicas.peers.peer import Peer

ALL = "all"
STOCK = "vllm"
"""Name of vLLM's own scheduler class, unchanged, with the prefix cache on."""
STOCK_NO_CACHE = "vllm-nocache"
"""Name of the same class with the prefix cache off, which was the baseline of the papers."""
BASELINES = (STOCK_NO_CACHE, STOCK)
WITHOUT_HOST_TIER = frozenset({STOCK_NO_CACHE, "sglang", "sglang-lpm", "vllm-v0"})
"""Names of schedulers that have no host tier, whatever the size of the host memory. vLLM 0.2 discards a context when
its turn ends."""
CLAIRVOYANT = "clairvoyant"
"""Name of a policy that is an upper bound and no competitor, if it is registered. ``all`` lists it last."""
INFORMED = frozenset({"infercept", "lamps", "mars", "augserve", CLAIRVOYANT})
"""Policies that get true lengths and durations unless a flag disables it, because their papers assume them."""
ENDS_REPORTED = frozenset({"continuum"})
"""Policies whose clients always report the end of a program, because their papers assume it (Continuum section 4.1)."""
UNBOUNDED = "none"
"""In place of the seconds of a bound: nothing has a bound."""
MIX = "+"
"""Between a policy's name and the axes that other policies decide: ``vllm+order=infercept``."""
AXES = ("order", "pause", "budget")
"""The axes of a policy, each of which another policy can decide."""
BLOCK_SIZE = 16
"""Tokens of a KV block: vLLM's default on GPUs."""
GIB = 1 << 30
SECONDS_PER_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """The settings of all runs: one run for each combination of policy, router, rate and seed."""

    policies: tuple[str, ...]
    rates_per_s: tuple[float, ...]
    """Arrivals of programs per second, of each run."""
    preset: str = "opt-13b/h800"
    """A preset's name, or the path of a saved cost model."""
    trace: Path | None = None
    """Path of a trace; None uses the built-in workload."""
    missing_tool_s: float | None = None
    only_recorded: bool = False
    missing_tools_from: Path | None = None
    shaping: Shaping = field(default_factory=Shaping)
    minutes: float = 12.0
    """Length of the measured window in minutes. It begins after the warm-up and contains programs by arrival. It is not
    used with ``count``."""
    count: int | None = None
    """Number of programs of a run, those of the warm-up included; None: as many as arrive in ``minutes``. The measured
    window ends with the last arrival."""
    warmup_minutes: float = 2.0
    drain_s: float = 300.0
    """Seconds after the last arrival within which programs may end. Their tools alone may take minutes."""
    seeds: tuple[int, ...] = (0,)
    host_gib: float = 0.0
    """Host memory for the KV of each replica in GiB; 0 disables the host tier. Those of `WITHOUT_HOST_TIER`
    never have one."""
    disk_gib: float = 0.0
    """Disk for the KV of each replica in GiB, below the host tier; 0 disables the disk tier. Only policies of Caesura
    have one."""
    prefix_cache: bool = True
    """Whether the KV of a released context stays cached until its blocks are used again. False: only running and held
    contexts have KV, as in the engines of the papers."""
    slo_ttft: str = "1"
    """Seconds, or `UNBOUNDED`: nothing has a bound."""
    policy_slo_ttft: str | None = None
    """Likewise, as policies and routers get it; None: what is measured."""
    slo_norm_x: float = 10.0
    """SLO on a program's seconds per token without tools, as a multiple of the iteration time."""
    slo_per_turn_x: float | None = None
    """A turn's bound on its first token is at least so many times the time that its new tokens take alone. None: it is
    the same for all turns."""
    reports: str = Reports.NOTHING
    """What the clients report of their programs: a value of `Reports`. For `ENDS_REPORTED`, ends at least."""
    noises: tuple[float, ...] = (0.0,)
    """Each p is a run: an error of N(0, p · value) is added to each given value."""
    oracle: bool | None = None
    """Whether policies get true lengths and durations; None gives them to those of `INFORMED`."""
    forecasts: str | None = None
    """Name of a registered predictor of lengths and durations, or path of a file of forecasts, whose programs alone are
    simulated; None: replicas learn means during the run."""
    arrivals: str = "poisson"
    burst: str | None = None
    """``RATE:START_S:LENGTH_S``, see :class:`cluster.offline.simulator.load.Burst`."""
    replicas: int = 1
    routers: tuple[str, ...] = (LEAST_PROGRAMS,)
    max_ongoing: int | None = None
    """Ongoing turns of a replica at most, for routers other than Caesura's; None: no limit."""
    imbalanced_threshold: float = float("inf")
    """For prefix_affinity: difference in ongoing turns from which on it balances the replicas."""
    front: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of Caesura's router that differ from their defaults."""
    scaling: Scaling = field(default_factory=lambda: Scaling(STATIC))
    """How many of the replicas serve."""
    restart_every_s: float = 0.0
    """Seconds between the restarts of two replicas, one after another; 0: none restarts. A start takes as long as one
    of the autoscaler."""
    disaggregation: Disaggregation = field(default_factory=Disaggregation)
    """Which of the replicas only compute prompts."""
    under_way: int | None = None
    """Number of concurrent programs in a closed loop, which ignores the rate; None: an open loop."""
    max_batched_tokens: int | None = None
    """Tokens of a step at most; None: the engine's default on the preset's device."""
    max_num_seqs: int | None = None
    """Sequences of a step at most; None: the engine's default on the preset's device."""
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By policy, the parameters that differ from their defaults."""
    command: str = ""
    record: bool = False
    """Whether to keep the programs and memory samples for a record of each run."""

    def __post_init__(self) -> None:
        """Check all settings.

        Raises:
            ConfigError: a value is invalid; the message names the flag.
        """
        require_positive(
            {
                "--rates": min(self.rates_per_s, default=0.0),
                "--minutes": self.minutes,
                "--slo-ttft": _seconds("--slo-ttft", self.slo_ttft),
                "--policy-slo-ttft": _seconds("--policy-slo-ttft", self.policy_slo_ttft or self.slo_ttft),
                "--slo-norm-x": self.slo_norm_x,
                "--replicas": self.replicas,
                "--max-ongoing": self.max_ongoing,
                "--under-way": self.under_way,
                "--count": self.count,
                "--max-batched-tokens": self.max_batched_tokens,
                "--max-seqs": self.max_num_seqs,
                "--network-gbit-s": self.disaggregation.network_gbit_s,
            }
        )
        require_zero_or_more(
            {
                "--warmup": self.warmup_minutes,
                "--drain-s": self.drain_s,
                "--noise": min(self.noises, default=-1.0),
                "--host-gib": self.host_gib,
                "--disk-gib": self.disk_gib,
                "--restart-every-s": self.restart_every_s,
                "--prefill-replicas": self.disaggregation.replicas,
                "--prefill-above": self.disaggregation.above_tokens,
                "--seed": min(self.seeds, default=-1),
            }
        )
        check_shaping(self.shaping, self.missing_tool_s)
        check_missing(self.missing_tool_s, self.missing_tools_from, only_recorded=self.only_recorded)
        slowdown = self.slo_per_turn_x
        require(slowdown is None or 1 <= slowdown < float("inf"), "--slo-per-turn-x", slowdown, "must be 1 or more")
        require(self.imbalanced_threshold >= 0, "--imbalanced", self.imbalanced_threshold, "must be 0 or more")
        listed = {"--policies": self.policies, "--router": self.routers, "--rates": self.rates_per_s}
        for flag, values in {**listed, "--seed": self.seeds, "--noise": self.noises}.items():
            text = ",".join(map(str, values))
            require(len(set(values)) == len(values) > 0, flag, text, "is empty or repeats a value")
        if self.step_tokens < self.step_sequences:
            raise ConfigError(
                f"--max-batched-tokens: {self.step_tokens} is less than --max-seqs ({self.step_sequences})"
            )
        if self.reports not in list(Reports):
            raise ConfigError(f"--reports: unknown {self.reports!r}; choose from: {', '.join(Reports)}")
        if self.forecasts is not None:
            self._check_forecasts(self.forecasts)
        Arrivals.parse(self.arrivals, 1.0)
        programs = self.count or max(self.rates_per_s) * self.arrivals_s
        flag = "--count" if self.count else "--rates"
        require(programs <= MAX_PROGRAMS, flag, programs, f"programs in a run: {MAX_PROGRAMS} at most")
        if self.count is not None and (self.burst is not None or self.under_way is not None):
            raise ConfigError("--count: with neither --burst nor --under-way")
        if self.other_rate is not None and self.other_rate.end_s > self.arrivals_s:
            raise ConfigError(f"--burst: it ends at {self.other_rate.end_s:g} s, after the last arrival")
        if self.host_gib and not self._blocks_in(self.host_gib):
            raise ConfigError(f"--host-gib: {self.host_gib} is less than the KV of one block")
        if self.disk_gib and not self.host_gib:
            raise ConfigError("--disk-gib: needs --host-gib, since KV passes through the host tier")
        if self.disk_gib and not self.disk_blocks:
            raise ConfigError(f"--disk-gib: {self.disk_gib} is less than the KV of one block")
        for name in self.parameters:
            if name not in self.policies or name in BASELINES:
                raise ConfigError(f"--set {name}: no policy of that name is simulated with parameters")
        for name in self.policies:
            self.scheduler(name)
        for name in self.routers:
            check_router(name)
        front_settings(self.front)
        self._check_scaling()
        if self.under_way is not None and (self.burst is not None or len(self.rates_per_s) > 1):
            raise ConfigError("--under-way: programs come as others end; there are neither rates nor a burst")

    def _check_scaling(self) -> None:
        scaling = self.scaling
        if prefill := self.disaggregation.replicas:
            if self.routers != (OURS,) or not scaling.is_static or self.restart_every_s:
                raise ConfigError(
                    f"--prefill-replicas: needs --router {OURS}, with neither --autoscaler nor --restart-every-s"
                )
            if prefill >= self.replicas:
                raise ConfigError(f"--prefill-replicas: {prefill} is not less than --replicas ({self.replicas})")
        if self.restart_every_s:
            if self.routers != (OURS,) or not scaling.is_static:
                raise ConfigError(f"--restart-every-s: needs --router {OURS}, and no --autoscaler")
            if self.replicas < 2:
                raise ConfigError("--restart-every-s: needs at least two --replicas")
            require_positive({"--start-s": scaling.start_s})
        if scaling.is_static:
            return
        if self.routers != (OURS,):
            raise ConfigError(
                f"--autoscaler: needs --router {OURS}, whose engine moves programs from replicas that end"
            )
        if not 1 <= scaling.least <= self.replicas:
            raise ConfigError(f"--min-replicas: {scaling.least} is not from 1 to --replicas ({self.replicas})")
        require_positive({"--start-s": scaling.start_s, "--target-ongoing": scaling.target_ongoing})

    def _check_forecasts(self, name: str) -> None:
        if name in BASED_PREDICTORS:
            raise ConfigError(f"--forecasts: {name} has to be trained; give the file of `caesura predictor forecast`")
        if name not in PREDICTORS and not Path(name).is_file():
            known = ", ".join(one for one in PREDICTORS if one not in BASED_PREDICTORS)
            raise ConfigError(f"--forecasts: no predictor {name!r} and no file; choose a file or one of: {known}")
        shaping = self.shaping
        kept = Shaping(max_context=shaping.max_context, limit=shaping.limit)
        if self.trace is None or replace(shaping, categories=(), calls=None) != kept:
            raise ConfigError("--forecasts: of a --trace as it was recorded, neither scaled nor cut nor repeated")

    @property
    def warmup_s(self) -> float:
        """Seconds of arrivals that are not measured."""
        return self.warmup_minutes * SECONDS_PER_MINUTE

    @property
    def window_s(self) -> float:
        """Seconds of arrivals that are measured."""
        return self.minutes * SECONDS_PER_MINUTE

    @property
    def arrivals_s(self) -> float:
        """Seconds of all arrivals, including the warm-up."""
        return self.warmup_s + self.window_s

    @property
    def other_rate(self) -> Burst | None:
        """The burst; None if there is none."""
        return None if self.burst is None else Burst.parse(self.burst)

    def cost_model(self) -> CostModel:
        """Load the cost model of steps, which also has the size of the KV cache.

        Raises:
            ConfigError: there is no such preset or file.
        """
        return cost_model(self.preset)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step at most."""
        return self.max_batched_tokens or self.cost_model().step_tokens

    @property
    def step_sequences(self) -> int:
        """Sequences of a step at most. As in vLLM, a default is at most the number of tokens."""
        return self.max_num_seqs or min(self.cost_model().step_sequences, self.step_tokens)

    @property
    def blocks(self) -> int:
        """Number of KV blocks of one replica that turns can use."""
        return self.cost_model().kv_capacity_tokens // BLOCK_SIZE

    def host_blocks(self, policy: str) -> int:
        """Return the number of host tier blocks of one replica under ``policy``; 0 if it has no host tier.

        Without a prefix cache, only the policies of Caesura have one: vLLM's own connector is a cache.
        """
        is_theirs = policy in BASELINES or policy in PEERS
        if policy in WITHOUT_HOST_TIER or (is_theirs and not self.prefix_cache):
            return 0
        return self._blocks_in(self.host_gib)

    def _blocks_in(self, gib: float) -> int:
        return int(gib * GIB / (self.cost_model().kv_bytes_per_token * BLOCK_SIZE))

    @property
    def disk_blocks(self) -> int:
        """Number of blocks of one replica's disk tier."""
        return self._blocks_in(self.disk_gib)

    def tier(self, policy: str) -> str:
        """Describe in words which KV remains after a turn under ``policy``."""
        if policy == STOCK_NO_CACHE:
            return "prefix cache off, no host tier"
        host = f"host tier {self.host_gib:g} GiB" if self.host_blocks(policy) else "no host tier"
        disk = f", disk tier {self.disk_gib:g} GiB" if self.disk_gib and policy not in (*BASELINES, *PEERS) else ""
        return f"prefix cache {'on' if self.prefix_cache else 'off'}, {host}{disk}"

    def fitting(self) -> Shaping:
        """Return how programs are shaped, so that each fits into the memory of one replica."""
        memory_tokens = self.blocks * BLOCK_SIZE
        return replace(self.shaping, max_context=min(memory_tokens, self.shaping.max_context or memory_tokens))

    def scheduler(self, name: str) -> "PolicyConfig | Peer | None":
        """Return the configuration of a policy, or a new peer; None for a baseline: vLLM's own scheduler class.

        Raises:
            ConfigError: there is no such policy or parameter, or the package of a peer is not installed.
        """
        if name in BASELINES:
            return None
        parameters = dict(self.parameters.get(name, {}))
        if name in PEERS:
            peer: Peer = _validated(name, PEERS.load(name), parameters).build(self.cost_model())
            return peer
        mixed = _mixed(name)
        for one in mixed.values():
            if one not in POLICIES:
                known = ", ".join(sorted({*BASELINES, *POLICIES, *PEERS}))
                raise ConfigError(f"--policies: unknown policy {one!r}; choose {ALL} or some of: {known}")
        _validated(name, POLICIES.load(mixed["name"]), parameters)
        return PolicyConfig(parameters=parameters, **mixed)

    def sees_the_future(self, name: str) -> bool:
        """Return whether the policy ``name`` gets true or noisy lengths and durations. Baselines and peers never do."""
        if name in BASELINES or name in PEERS:
            return False
        return not INFORMED.isdisjoint(_mixed(name).values()) if self.oracle is None else self.oracle

    def reports_of(self, name: str) -> Reports:
        """Return what the clients report under the policy ``name``."""
        known = name not in BASELINES and name not in PEERS and not ENDS_REPORTED.isdisjoint(_mixed(name).values())
        return Reports.ENDS if known and self.reports == Reports.NOTHING else Reports(self.reports)

    def slo(self) -> SloConfig:
        """Return the SLO that policies and routers get: what an operator configures, without the bound per token."""
        ttft_s = _seconds("--policy-slo-ttft", self.policy_slo_ttft or self.slo_ttft)
        return SloConfig(ttft_s=ttft_s, slowdown=self.slo_per_turn_x)

    def goodput_slo(self) -> Slo:
        """Return the SLO by which results are measured."""
        return self._bounds(_seconds("--slo-ttft", self.slo_ttft))

    def _bounds(self, ttft_s: float | None) -> Slo:
        """Return the bounds. The iteration time is that of a step that decodes one sequence without a context."""
        if ttft_s is None:
            return Slo(slowdown=self.slo_per_turn_x)
        norm_s = self.slo_norm_x * self.cost_model().decode_step_s()
        return Slo(ttft_s=ttft_s, normalized_latency_s=norm_s, slowdown=self.slo_per_turn_x)


def _seconds(flag: str, text: str) -> float | None:
    """Return the seconds; None: `UNBOUNDED`.

    Raises:
        ConfigError: it is neither.
    """
    if text.strip() == UNBOUNDED:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is neither a number of seconds nor {UNBOUNDED}") from None


def _validated(name: str, model: Any, parameters: Mapping[str, Any]) -> Any:
    try:
        return model.model_validate(parameters)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"--set {name}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _mixed(text: str) -> dict[str, str]:
    """Return the name of a policy, and by axis the names of those that decide the axis in its place.

    Raises:
        ConfigError: there is no such axis, or it is named twice.
    """
    name, *others = text.split(MIX)
    mixed = {"name": name}
    for other in others:
        axis, _, decides = other.partition("=")
        if axis not in AXES or axis in mixed:
            raise ConfigError(f"--policies: {text}: {axis!r} is not one of {', '.join(AXES)}, or is there twice")
        mixed[axis] = decides
    return mixed


def policy_names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas. ``all`` stands for the baselines and all policies, without peers."""
    if text.strip() != ALL:
        return listed(text)
    limits = [name for name in POLICIES if name == CLAIRVOYANT]
    return (*BASELINES, *(name for name in POLICIES if name not in (*BASELINES, CLAIRVOYANT)), *limits)
