"""`caesura trace`: converts traces of agents between formats, and checks them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.core.errors import ConfigError
from cluster.core.registry import TRACE_FORMATS

if TYPE_CHECKING:
    from cluster.offline.traces.format import Options
    from cluster.offline.traces.losses import Losses

app = typer.Typer(no_args_is_help=True, help="Traces of agents.")

NAMES = ", ".join(TRACE_FORMATS)
BLOCK_TOKENS = 512

BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens of a block of hash_ids (mooncake, aiperf).")]
EveryS = Annotated[
    float, typer.Option(help="Seconds between programs without a recorded arrival (to mooncake or otel).")
]
OutputTokens = Annotated[
    int | None, typer.Option(min=1, help="Output tokens of turns that name no output_length (aiperf).")
]
Tokenizer = Annotated[
    Path | None, typer.Option(metavar="FILE", help="tokenizer.json, for turns that have a text and no length (aiperf).")
]


@app.callback()
def trace() -> None:
    """Convert traces of agents between formats, and check them."""


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="File to read; .gz is decompressed.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write; .gz is compressed.")],
    from_: Annotated[str, typer.Option("--from", metavar="FORMAT", help=f"Its format: {NAMES}.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="The format to write: one of the same.")],
    block_tokens: BlockTokens = BLOCK_TOKENS,
    every_s: EveryS = 1.0,
    output_tokens: OutputTokens = None,
    tokenizer: Tokenizer = None,
) -> None:
    """Convert a trace into another format, and print what the formats carry and what is lost, with counts.

    A file of the format caesura is what bench and simulate --trace read. A value that cannot be used ends the command
    with the file, the line and the field.
    """
    from cluster.offline.traces import conversion

    options = _options(block_tokens, every_s, output_tokens, tokenizer)
    counts, losses = conversion.convert(source, from_, target, to, options)
    typer.echo(f"wrote {target}: {counts.line()}")
    for name in dict.fromkeys((from_, to)):
        typer.echo(f"{name} carries: {conversion.format_of(name).carries}")
    _show(losses)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The trace; .gz is decompressed.")],
    format_: Annotated[str, typer.Option("--format", metavar="FORMAT", help=f"Its format: {NAMES}.")] = "caesura",
    block_tokens: BlockTokens = BLOCK_TOKENS,
    output_tokens: OutputTokens = None,
    tokenizer: Tokenizer = None,
) -> None:
    """Read a whole trace, and print what it has, or the first line and field that cannot be used."""
    from cluster.offline.traces import conversion

    counts, losses = conversion.check(file, format_, _options(block_tokens, 1.0, output_tokens, tokenizer))
    typer.echo(f"{file} is valid: {counts.line()}")
    _show(losses)


def _options(block_tokens: int, every_s: float, output_tokens: int | None, tokenizer: Path | None) -> "Options":
    from cluster.core.recorded_turn import MAX_PAUSE_S
    from cluster.offline.traces.format import Options

    if not 0 <= every_s <= MAX_PAUSE_S:
        raise ConfigError(f"--every-s: {every_s:g} is not between 0 and {MAX_PAUSE_S:g} s")
    return Options(block_tokens, every_s, output_tokens, tokenizer)


def _show(losses: "Losses") -> None:
    for line in losses.lines():
        typer.echo(line)
