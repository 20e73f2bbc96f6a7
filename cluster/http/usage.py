"""`GET /admin/usage`: what each program has used in a day, as CSV."""

import csv
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from http import HTTPStatus
from io import StringIO

from starlette.responses import Response

from cluster.core.errors import BadRequest, HttpError
from cluster.core.usage import SUMS, ProgramUsage
from cluster.store.client import StoreUnavailable
from cluster.store.usage import KEPT, UsageStore

COLUMNS = ("day", "tenant", "model", "program", *SUMS)


async def usage_of_day(store: UsageStore, day: str | None, wall: Callable[[], float]) -> Response:
    """Return the usage of a day as CSV, one line for each program.

    Args:
        store: has the usage.
        day: the day in UTC as YYYY-MM-DD. None: today.
        wall: returns the Unix time in seconds.

    Raises:
        HttpError: ``day`` is no day, it lies in the future or is no longer kept, or the store does not answer.
    """
    wanted = read_day(day, datetime.fromtimestamp(wall(), UTC).date())
    try:
        found = await store.read(wanted)
    except StoreUnavailable as error:
        raise HttpError(
            f"the store does not answer: {error.reason}", status=HTTPStatus.SERVICE_UNAVAILABLE, retry_after_s=1
        ) from error
    headers = {"Content-Disposition": f'attachment; filename="usage-{wanted}.csv"'}
    return Response(as_csv(wanted, found), media_type="text/csv", headers=headers)


def read_day(day: str | None, today: date) -> str:
    """Return the day as YYYY-MM-DD.

    Raises:
        BadRequest: it is no day, or there can be no usage of it.
    """
    if day is None:
        return today.isoformat()
    try:
        read = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).date()
    except ValueError as error:
        raise BadRequest(f"day must be a date like {today.isoformat()}, not {day[:40]!r}", param="day") from error
    if not today - KEPT < read <= today:
        first = today - KEPT
        raise BadRequest(f"day must be after {first} and at most {today}; usage is kept for a week", param="day")
    return read.isoformat()


def as_csv(day: str, found: Mapping[tuple[str, str, str], ProgramUsage]) -> str:
    """Return the lines in the order of tenant, model and program. The first one has the names of the columns."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for (tenant, model, program), usage in sorted(found.items()):
        sums = (getattr(usage, name) for name in SUMS)
        numbers = (f"{value:.6f}" if isinstance(value, float) else value for value in sums)
        writer.writerow((day, *map(_inert, (tenant, model, program)), *numbers))
    return text.getvalue()


def _inert(text: str) -> str:
    """Return a name so that no spreadsheet takes it for a formula: clients choose the names of programs."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
