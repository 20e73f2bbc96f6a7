"""`--traces A B C`: options of the command line that take all files up to the next option."""

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

FILE_LISTS = ("--traces", "--text")


class FileListsCommand(TyperCommand):
    """A command whose options FILE_LISTS take one file or several, or are repeated."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        return super().parse_args(ctx, repeated(args))


def repeated(args: Sequence[str]) -> list[str]:
    """The same arguments with a file list's option before each of its files."""
    written: list[str] = []
    option: str | None = None
    for arg in args:
        if arg.startswith("-"):
            option = arg if arg in FILE_LISTS else None
            written.append(arg)
        elif option is not None and written[-1] != option:
            written += [option, arg]
        else:
            written.append(arg)
    return written
