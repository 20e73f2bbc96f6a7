"""The paths that make work for a replica."""

TURN_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TOKEN_PATHS = {"tokenize": "/tokenize", "detokenize": "/detokenize"}
RESPONSES = "/v1/responses"

LIMITED_PATHS = frozenset({*TURN_PATHS.values(), *TOKEN_PATHS.values(), RESPONSES})
"""Of the ingress. Their requests are counted and bounded; everything else always passes."""
