"""The reference of the command line, made from the commands themselves."""

from collections.abc import Iterator, Sequence

from typer import Context
from typer.core import TyperArgument, TyperGroup, TyperOption

from cluster.reference.markdown import code, page, table

INTRODUCTION = """`make setup` puts `caesura` into `.venv/bin`. Exit status 2 means a configuration, a trace or a flag
that cannot be used; 1, that the command failed."""


def cli_page(root: TyperGroup, context: Context) -> str:
    """The page.

    Args:
        root: the command under which all are.
        context: of any call; types are told by it.
    """
    return page("Command line reference", INTRODUCTION, *_commands(root, "caesura", context))


def _commands(group: TyperGroup, prefix: str, context: Context) -> Iterator[str]:
    for name in sorted(group.commands):
        command = group.commands[name]
        if command.hidden:
            continue
        path = f"{prefix} {name}"
        if isinstance(command, TyperGroup):
            yield from _commands(command, path, context)
            continue
        yield f"## {path}"
        yield " ".join((command.help or "").split())
        yield _parameters(command.params, context)


def _parameters(every: Sequence[object], context: Context) -> str:
    arguments = [one for one in every if isinstance(one, TyperArgument)]
    options = [one for one in every if isinstance(one, TyperOption) and not one.hidden]
    rows = [(code(one.name.upper()), "required" if one.required else "", _help(one)) for one in arguments]
    rows += [(_names(one, context), _default(one), _help(one)) for one in options]
    return table(("option", "default", "what it does"), rows) if rows else ""


def _names(option: TyperOption, context: Context) -> str:
    names = ", ".join((*option.opts, *option.secondary_opts))
    return code(names if option.is_flag else f"{names} {option.metavar or option.display_type(context).strip('<>')}")


def _default(option: TyperOption) -> str:
    if option.required:
        return "required"
    if option.default in (None, "", (), []) or option.default is False or callable(option.default):
        return ""
    return code(str(option.default))


def _help(parameter: TyperOption | TyperArgument) -> str:
    return getattr(parameter, "help", None) or ""
