"""Whose turn is this? Headers and bodies of every dialect that agent clients speak, read into one ProgramIdentity.

Each field (program, parent, last turn, every hint) is taken from the first source that says it, in the order of
``cluster.identity_dialects.DIALECTS``; a later source that says something else is a conflict, never an error.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cluster.errors import BadRequest
from cluster.identity_dialects import DIALECTS, Claim, Request, identifier
from cluster.program import DEFAULT_TENANT, WIRE_KEY, Hints, ProgramIdentity

_HINTS = frozenset(field.name for field in fields(Hints))

# The wire key is ours alone: a client that sent it would speak to the scheduler in another tenant's name.
_CONSUMED = frozenset(path for dialect in DIALECTS for path in dialect.consumes) | {f"vllm_xargs.{WIRE_KEY}"}


@dataclass(frozen=True, slots=True)
class Identified:
    """A request, and who asks."""

    identity: ProgramIdentity
    body: dict[str, Any]
    """The body without the fields in which a dialect spoke; the fields that vLLM serves from are as they were."""
    conflicts: tuple[str, ...]
    """For people: one for each source that disagrees with a source before it."""


def identify(headers: Mapping[str, str], body: Mapping[str, Any], tenant: str = DEFAULT_TENANT) -> Identified:
    """Read a request's identity and hints. Neither argument is changed.

    Args:
        headers: of the HTTP request; names in any case, with ``-`` or ``_``.
        body: the parsed JSON object.
        tenant: who the caller found the client to be; ids of different tenants never meet.

    Raises:
        BadRequest: an id or hint that cannot be used; ``param`` is its header or the dotted path in the body.
    """
    request = Request.of(headers, body)
    kept, conflicts = _first_of_each(claim for dialect in DIALECTS for claim in dialect.extract(request))
    said: dict[str, Any] = {field: claim.value for field, claim in kept.items()}
    hints = Hints(**{field: said.pop(field) for field in _HINTS & said.keys()})
    if said.get("parent_id") == said.get("program_id"):
        said.pop("parent_id", None)  # the root of a tree names itself in some dialects
    identity = ProgramIdentity(tenant=_tenant(tenant), hints=hints, **said)
    return Identified(identity, _without_dialects(body), tuple(conflicts))


def _first_of_each(claims: Iterable[Claim]) -> tuple[dict[str, Claim], list[str]]:
    kept: dict[str, Claim] = {}
    conflicts = []
    for claim in claims:
        first = kept.setdefault(claim.field, claim)
        if first.value != claim.value:
            conflicts.append(
                f"{claim.field}: {first.source} says {first.value!r}, which counts; {claim.source} says {claim.value!r}"
            )
    return kept, conflicts


def _tenant(tenant: str) -> str:
    # A slash would let one tenant's key (tenant/program) equal another's.
    if "/" in tenant:
        raise BadRequest("a tenant's name has no '/'", param="tenant")
    return identifier("tenant", tenant) or DEFAULT_TENANT


def _without_dialects(body: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = {key: value for key, value in body.items() if key not in _CONSUMED}
    if xargs := body.get("vllm_xargs"):
        cleaned["vllm_xargs"] = {key: value for key, value in xargs.items() if f"vllm_xargs.{key}" not in _CONSUMED}
        if not cleaned["vllm_xargs"]:
            del cleaned["vllm_xargs"]
    return cleaned
