"""Which names vLLM takes as arguments of an engine and of the OpenAI surface in front of it."""

from collections.abc import Iterable
from dataclasses import fields


def unknown_engine_arguments(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that the installed vLLM does not know, in their order. Imports vLLM: seconds.

    Ray Serve LLM takes both kinds through its ``engine_kwargs``: ``chat_template``, for one, is of the surface.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    known = {field.name for kind in (AsyncEngineArgs, FrontendArgs) for field in fields(kind) if field.init}
    return [name for name in names if name not in known]
