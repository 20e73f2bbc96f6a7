"""Reads the program identity of a request from its headers and body, in all dialects that agent clients use.

Each field (program, parent, last turn, every hint) is taken from the first source that has it, in the order of
``cluster.core.identity_dialects.DIALECTS``. If none names a program, the fields of
``cluster.core.identity_fallbacks`` are read. A different value in a later source is reported as a conflict. It is never
an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from cluster.core.errors import BadRequest, HttpError
from cluster.core.identity_dialects import DIALECTS, Claim, Request, identifier
from cluster.core.identity_fallbacks import fallback_claim
from cluster.core.program import DEFAULT_TENANT, WIRE_KEY, Hints, ProgramIdentity

_HINTS = frozenset(field.name for field in fields(Hints))

# Only the cluster may set the wire key. A client that sent it could act as another tenant towards the scheduler.
_CONSUMED = frozenset(path for dialect in DIALECTS for path in dialect.consumes) | {f"vllm_xargs.{WIRE_KEY}"}

VISIBLE_HEADERS = ("x-session-id",)
"""Client headers that HAProxy forwards and that name a program."""


@dataclass(frozen=True, slots=True)
class Identified:
    """A request with its identity."""

    identity: ProgramIdentity
    body: dict[str, Any]
    """The body without the fields that only dialects use. The fields that vLLM reads are unchanged."""
    conflicts: tuple[str, ...]
    """One readable message for each source whose value differs from that of a source before it."""


def identify(
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    tenant: str = DEFAULT_TENANT,
    session_headers: Sequence[str] = (),
) -> Identified:
    """Read a request's identity and hints. Neither argument is changed.

    Args:
        headers: the headers of the HTTP request. Their names may have any case, and ``-`` or ``_``.
        body: the parsed JSON object.
        tenant: the client's tenant, as the caller found it. Equal ids of different tenants are different programs.
        session_headers: further headers that name the program, in lower case and with hyphens. They are read last.

    Raises:
        BadRequest: an id or a hint is invalid. ``param`` is its header or its dotted path in the body.
    """
    request = Request.of(headers, body)
    kept, conflicts = _first_of_each(claim for dialect in DIALECTS for claim in dialect.extract(request))
    if "program_id" not in kept and (fallback := fallback_claim(request, session_headers)) is not None:
        kept["program_id"] = fallback
    said: dict[str, Any] = {field: claim.value for field, claim in kept.items()}
    hints = Hints(**{field: said.pop(field) for field in _HINTS & said.keys()})
    if said.get("parent_id") == said.get("program_id"):
        said.pop("parent_id", None)  # in some dialects, the root of a tree names itself as its parent
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


def identity_of_headers(headers: Mapping[str, str]) -> ProgramIdentity:
    """Return the identity that the headers alone give. Invalid headers give an empty one."""
    try:
        return identify(headers, {}, DEFAULT_TENANT).identity
    except HttpError:
        return ProgramIdentity()
