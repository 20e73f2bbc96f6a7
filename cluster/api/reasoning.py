"""The effort of reasoning, as chat completions, responses and messages name it."""

from collections.abc import Mapping
from typing import Any, Literal

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""vLLM's values of `reasoning_effort`."""


def template_settings(effort: str | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings with which vLLM renders a chat completion.

    `/tokenize` has no `reasoning_effort`, so that it needs the settings that vLLM makes of it.

    Args:
        effort: the `reasoning_effort`.
        given: the `chat_template_kwargs`, which are not changed. Their `enable_thinking` stays. The effort is stronger
            than theirs.
    """
    if effort is None:
        return dict(given or {})
    return {"enable_thinking": effort != "none", **(given or {}), "reasoning_effort": effort}
