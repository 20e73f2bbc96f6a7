"""The options by which `bench` and `simulate` shape the programs of a trace, and what they mean together."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cluster.offline.bench.workload import Shaping

ScaleLengths = Annotated[float, typer.Option(help="Factor on all token lengths.")]
ScaleTools = Annotated[float, typer.Option(help="Factor on all tool durations.")]
MaxContext = Annotated[int | None, typer.Option(help="Drop programs that need more tokens.")]
MaxTurns = Annotated[int | None, typer.Option(help="Cut off later turns.")]
Limit = Annotated[int | None, typer.Option(help="Use only so many programs, drawn by the seed.")]
Categories = Annotated[str, typer.Option(help="a,b: only programs of these categories of the trace.")]
Calls = Annotated[str | None, typer.Option(help="N or MIN-MAX: only programs with so many tool calls.")]
NoCallsShare = Annotated[float, typer.Option(help="Share of the programs whose calls are disabled.")]
RepeatTurns = Annotated[int, typer.Option(help="Times that a program does its turns, with shorter lengths.")]


def shaping_of(
    scale_lengths: float,
    scale_tools: float,
    max_context: int | None,
    max_turns: int | None,
    limit: int | None,
    categories: str,
    calls: str | None,
    no_calls_share: float,
    repeat_turns: int,
) -> "Shaping":
    """Return how programs are shaped. The arguments are the values of the options.

    Raises:
        ConfigError: ``calls`` is neither a number nor MIN-MAX.
    """
    from cluster.offline.bench.settings import listed, read_calls
    from cluster.offline.bench.workload import Shaping

    return Shaping(
        scale_lengths=scale_lengths,
        scale_tools=scale_tools,
        max_context=max_context,
        max_turns=max_turns,
        limit=limit,
        categories=listed(categories),
        calls=read_calls(calls),
        no_calls_share=no_calls_share,
        repeat_turns=repeat_turns,
    )
