"""The built-in workload: programs of the six call types of InferCept (Abhyankar et al., ICML 2024), from its Table 1.

The table gives, for each type, (mean, spread) of the interception time, of the number of interceptions, and of the
context length at an interception. Its caption calls the second number a variance. The authors' published programs show
that it is the standard deviation (virtual environment: 0.0143 s, whose square is 0.0002; the table has 0.014). It is
used as such here.

The table has no output and return lengths. The means of the authors' published programs are used for them.
"""

from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from cluster.offline.bench.workload import PlannedProgram, PlannedTurn, Workload

STOCHASTIC_ROUNDING_VARIANCE = 1 / 6
"""Variance that random rounding adds: the mean of f(1-f) over a fraction f."""


@dataclass(frozen=True, slots=True)
class CallType:
    """One row of Table 1, as (mean, standard deviation), and two means of the published programs."""

    kind: str
    tool: str
    pause_s: tuple[float, float]
    calls: tuple[float, float]
    context_tokens: tuple[float, float]
    """Tokens of prompt and output at the time of a call."""
    output_tokens: float
    """Tokens generated before each call."""
    return_tokens: float
    """Tokens returned by each call."""


TABLE_1 = (
    CallType("math", "calculator", (9e-5, 6e-5), (3.75, 1.3), (1422, 738), 123, 21),
    CallType("qa", "wikipedia_qa", (0.69, 0.17), (2.52, 1.73), (1846, 428), 183, 58),
    CallType("ve", "alfworld_env", (0.09, 0.014), (28.18, 15.2), (2185, 115), 4, 8),
    CallType("chatbot", "user_reply", (28.6, 15.6), (4.45, 1.96), (753, 703), 114, 27),
    CallType("image", "image_gen", (20.03, 7.8), (6.91, 3.93), (1247, 792), 33, 15),
    CallType("tts", "tts", (17.24, 7.6), (6.91, 3.93), (1251, 792), 33, 15),
)


def builtin_workload(seed: int, count: int) -> Workload:
    """Make ``count`` programs, equally many of each type, in random order. The same ``seed`` gives the same programs.

    Times and each program's mean context have a Gamma distribution. A program has at least one call. Output and return
    lengths are proportional to a program's mean context. The table's spread of the context is used for the means of
    programs. The spread over single calls is somewhat wider, because each program's context grows.
    """
    rng = np.random.default_rng([seed, count])
    types = list(islice(cycle(TABLE_1), count))
    programs = [_program(types[i], f"{types[i].kind}-{i}", rng) for i in rng.permutation(count)]
    return Workload(name="infercept", programs=tuple(programs))


def _program(row: CallType, program_id: str, rng: np.random.Generator) -> PlannedProgram:
    calls = _calls(row, rng)
    mean_context = _gamma(row.context_tokens, rng)
    scale = mean_context / row.context_tokens[0]
    output, returned = row.output_tokens * scale, row.return_tokens * scale
    # The contexts at the calls grow from prompt + output in steps of output + returned. A program with many calls and a
    # short context grows by less, so that its prompt has at least one token.
    growth = output + (calls - 1) / 2 * (output + returned)
    fit = min(1.0, max(0.0, mean_context - 1) / growth)
    out_tokens = max(1, round(output * fit))
    return_tokens = round(returned * fit)
    prompt = max(1, round(mean_context - out_tokens - (calls - 1) / 2 * (out_tokens + return_tokens)))
    turns = [
        PlannedTurn(
            fresh_tokens=prompt if index == 0 else return_tokens,
            output_tokens=out_tokens,
            kept_tokens=out_tokens,
            tool=row.tool if index < calls else None,
            pause_s=_gamma(row.pause_s, rng) if index < calls else 0.0,
        )
        for index in range(calls + 1)
    ]
    return PlannedProgram(program_id=program_id, kind=row.kind, turns=tuple(turns))


def _gamma(mean_sd: tuple[float, float], rng: np.random.Generator) -> float:
    mean, sd = mean_sd
    return float(rng.gamma((mean / sd) ** 2, sd**2 / mean))


def _calls(row: CallType, rng: np.random.Generator) -> int:
    mean, sd = row.calls
    beyond_first = _gamma((mean - 1, (sd**2 - STOCHASTIC_ROUNDING_VARIANCE) ** 0.5), rng)
    return 1 + int(beyond_first + rng.random())
