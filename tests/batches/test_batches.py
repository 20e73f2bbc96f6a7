"""Batches through OpenAI's client: every line is in the output or in the error file, once."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from openai import (
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
    UnprocessableEntityError,
)

from cluster.batches.runner import MAX_OPEN_OF_TENANT
from cluster.http.files import MAX_TENANT_UPLOADS
from tests.batches.batch_site import CHAT, Ingress, begin, ended, ids, lines, names, results, until

MakeIngress = Callable[..., Ingress]
BRIEF = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}


async def test_every_line_is_answered_once(ingress: MakeIngress) -> None:
    site = ingress()
    client = site.client()
    site.replicas.statuses["line-3"] = [400]
    batch = await begin(client, lines(*names(200)), metadata={"of": "a test"})
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"of": "a test"})
    done = await ended(client, batch.id)
    assert done.status == "completed" and done.errors is None
    assert done.request_counts.to_dict() == {"total": 200, "completed": 199, "failed": 1}
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.expires_at == done.created_at + 24 * 3600
    good, bad = await results(client, done.output_file_id), await results(client, done.error_file_id)
    assert Counter(line["custom_id"] for line in (*good, *bad)) == Counter(names(200))
    line = next(line for line in good if line["custom_id"] == "line-7")
    assert line["error"] is None and line["response"]["status_code"] == 200
    assert line["response"]["body"] == {"said": "line-7"}
    assert [line["response"]["status_code"] for line in bad] == [400]
    assert set(site.replicas.calls.values()) == {1}
    output = await client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.bytes == len((await client.files.content(output.id)).content)


async def test_lines_that_are_refused_wait_and_are_put_back(ingress: MakeIngress) -> None:
    site = ingress()
    client = site.client()
    site.replicas.statuses |= {name: [503, 429, 503] for name in names(12)}
    done = await ended(client, (await begin(client, lines(*names(12)))).id)
    assert done.request_counts.completed == 12
    assert set(site.replicas.calls.values()) == {4}
    assert site.batches.lines["default", "put_back"] == 36


async def test_a_batch_whose_model_has_no_room_delays_no_other(ingress: MakeIngress) -> None:
    site = ingress()
    client = site.client()
    site.replicas.statuses["full"] = [503] * 1000
    site.replicas.retry_after_s = 3600.0
    first = await begin(client, lines("full"))
    await until(client, first.id, lambda _: site.replicas.calls["full"] == 1)
    done = await ended(client, (await begin(client, lines(*names(12)))).id)
    assert done.request_counts.completed == 12
    assert (await client.batches.retrieve(first.id)).status == "in_progress"
    assert site.replicas.calls["full"] == 1


async def test_lines_that_fail_in_the_cluster_are_tried_three_times(ingress: MakeIngress) -> None:
    site = ingress()
    client = site.client()
    site.replicas.statuses |= {"once": [502], "always": [502] * 9}
    done = await ended(client, (await begin(client, lines("once", "always"))).id)
    assert (site.replicas.calls["once"], site.replicas.calls["always"]) == (2, 3)
    assert await ids(client, done.output_file_id) == ["once"]
    assert await ids(client, done.error_file_id) == ["always"]


async def test_a_line_that_a_bug_stopped_is_started_again(
    ingress: MakeIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = ingress()
    client = site.client()
    answer, failures = site.replicas.answer, ["line-1"]

    async def fails_once(batch: Any, number: int, request: Any) -> Any:
        if request.custom_id in failures:
            failures.remove(request.custom_id)
            raise RuntimeError("a bug")
        return await answer(batch, number, request)

    monkeypatch.setattr(site.replicas, "answer", fails_once)
    done = await ended(client, (await begin(client, lines(*names(3)))).id)
    assert done.request_counts.completed == 3


async def test_the_window_bounds_the_lines_in_flight(ingress: MakeIngress) -> None:
    site = ingress(max_concurrent=3)
    client = site.client()
    await ended(client, (await begin(client, lines(*names(40)))).id)
    assert site.replicas.most == 3


async def test_a_wrong_file_fails_with_the_lines_that_are_wrong(ingress: MakeIngress) -> None:
    site = ingress()
    client = site.client()
    good = json.loads(lines("a"))
    wrong = [
        b"no json",
        json.dumps(good | {"url": "/v1/other"}).encode(),
        json.dumps({key: good[key] for key in ("method", "url", "body")}).encode(),
        json.dumps(good | {"body": [1]}).encode(),
        json.dumps(good | {"more": 1}).encode(),
        json.dumps(good | {"method": "GET"}).encode(),
    ]
    batch = await begin(client, b"\n".join([lines("a", "a").strip(), *wrong, b""]))
    done = await ended(client, batch.id)
    assert (done.status, done.output_file_id, done.request_counts.total) == ("failed", None, 0)
    assert done.failed_at is not None and site.replicas.calls == Counter()
    assert [(one.line, one.code, one.param) for one in done.errors.data] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_json_line", None),
        (4, "mismatched_url", "url"),
        (5, "missing_required_parameter", "custom_id"),
        (6, "invalid_body", "body"),
        (7, "invalid_request_line", "more"),
        (8, "invalid_method", "method"),
    ]


async def test_cancel_keeps_what_was_answered(ingress: MakeIngress) -> None:
    site = ingress()
    client = site.client()
    site.replicas.free = 5
    batch = await begin(client, lines(*names(30)))
    await until(client, batch.id, lambda one: one.request_counts.completed == 5)
    assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    done = await ended(client, batch.id)
    assert done.status == "cancelled" and done.cancelled_at >= done.cancelling_at
    assert done.request_counts.to_dict() == {"total": 30, "completed": 5, "failed": 25}
    assert len(await ids(client, done.output_file_id)) == 5
    errors = await results(client, done.error_file_id)
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert sorted(await ids(client, done.output_file_id, done.error_file_id)) == sorted(names(30))
    assert site.replicas.stopped and not site.batches.in_flight
    assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_a_batch_that_has_ended_cannot_be_cancelled(ingress: MakeIngress) -> None:
    client = ingress().client()
    done = await ended(client, (await begin(client, lines("a"))).id)
    with pytest.raises(ConflictError, match="Cannot cancel a batch with status 'completed'"):
        await client.batches.cancel(done.id)


async def test_the_window_of_a_batch_ends(ingress: MakeIngress) -> None:
    site = ingress()
    client = site.client()
    site.replicas.free = 2
    batch = await begin(client, lines(*names(6)), completion_window="1h")
    await until(client, batch.id, lambda one: one.request_counts.completed == 2)
    site.ahead_s = 3601.0
    done = await ended(client, batch.id)
    assert done.status == "expired" and done.expired_at is not None
    assert [line["error"]["code"] for line in await results(client, done.error_file_id)] == ["batch_expired"] * 4
    assert len(await ids(client, done.output_file_id)) == 2


async def test_tenants_see_their_own_only(ingress: MakeIngress) -> None:
    site = ingress()
    mine, theirs = site.client("mine"), site.client("theirs")
    done = await ended(mine, (await begin(mine, lines("a"))).id)
    assert [one.id async for one in theirs.batches.list()] == [one.id async for one in theirs.files.list()] == []
    for call in (
        theirs.batches.retrieve(done.id),
        theirs.batches.cancel(done.id),
        theirs.files.retrieve(done.output_file_id),
        theirs.files.content(done.input_file_id),
        theirs.files.delete(done.input_file_id),
        begin_of(theirs, done.input_file_id),
    ):
        with pytest.raises(NotFoundError):
            await call
    assert [one.id async for one in mine.batches.list()] == [done.id]
    assert {one.id async for one in mine.files.list()} == {done.input_file_id, done.output_file_id}
    assert [one.id async for one in mine.files.list(purpose="batch")] == [done.input_file_id]


def begin_of(client: Any, file_id: str) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


async def test_tenants_take_turns(ingress: MakeIngress) -> None:
    site = ingress(max_concurrent=2)
    site.replicas.free = 0
    large, small = site.client("large"), site.client("small")
    first = await begin(large, lines(*(f"l{n}" for n in range(400))))
    await until(large, first.id, lambda _: site.batches.in_flight == 2)
    second = await begin(small, lines("s0", "s1"))
    await until(small, second.id, lambda one: one.status == "in_progress")
    site.replicas.gate.set()
    await ended(large, first.id)
    assert (await ended(small, second.id)).request_counts.completed == 2
    # The small batch is read while lines of the large one go on.
    assert {"s0", "s1"} <= set(list(site.replicas.calls)[:200])


async def test_a_file_that_an_open_batch_reads_stays(ingress: MakeIngress) -> None:
    site = ingress()
    client = site.client()
    site.replicas.free = 0
    batch = await begin(client, lines("a"))
    with pytest.raises(ConflictError, match=batch.id):
        await client.files.delete(batch.input_file_id)
    site.replicas.gate.set()
    done = await ended(client, batch.id)
    assert (await client.files.delete(batch.input_file_id)).deleted
    await client.files.delete(done.output_file_id)
    with pytest.raises(NotFoundError):
        await client.files.content(done.output_file_id)
    assert (await client.batches.retrieve(batch.id)).status == "completed"


async def test_a_full_store_takes_no_batch_and_pauses_the_others(ingress: MakeIngress) -> None:
    site = ingress()
    client = site.client()
    site.replicas.free = 4
    batch = await begin(client, lines(*names(30)))
    await until(client, batch.id, lambda one: one.request_counts.completed == 4)
    site.is_full = True
    with pytest.raises(InternalServerError) as refused:
        await begin_of(client, batch.input_file_id)
    assert (refused.value.status_code, refused.value.code) == (503, "store_full")
    with pytest.raises(InternalServerError):
        await client.files.create(file=b"x", purpose="batch")
    await until(client, batch.id, lambda one: one.caesura["paused"] == "store_full")
    site.replicas.gate.set()
    paused = await until(client, batch.id, lambda _: not site.batches.in_flight)
    assert paused.request_counts.completed < 30
    site.is_full = False
    assert (await ended(client, batch.id)).request_counts.completed == 30


async def test_results_count_for_the_quota(ingress: MakeIngress) -> None:
    content = lines(*names(30))
    site = ingress(max_stored_bytes=len(content) + 500)
    site.replicas.free = 5
    client = site.client("quota")
    batch = await begin(client, content)
    await until(client, batch.id, lambda one: one.caesura["paused"] == "storage_quota")
    site.replicas.gate.set()
    paused = await until(client, batch.id, lambda _: not site.batches.in_flight)
    assert 5 <= paused.request_counts.completed < 30
    with pytest.raises(BadRequestError) as refused:
        await client.files.create(file=b"x" * 1024, purpose="batch")
    assert (refused.value.code, refused.value.param) == ("storage_quota_exceeded", "file")
    assert (await client.batches.cancel(batch.id)).caesura == {"paused": "storage_quota"}
    await ended(client, batch.id)


async def test_files_that_are_written_at_the_same_time_share_the_quota(ingress: MakeIngress) -> None:
    site = ingress(max_stored_bytes=1500)
    client = site.client("both")
    uploads = [client.files.create(file=b"x" * 1000, purpose="batch") for _ in range(2)]
    answers = await asyncio.gather(*uploads, return_exceptions=True)
    refused = [one for one in answers if isinstance(one, BadRequestError)]
    assert refused and {one.code for one in refused} == {"storage_quota_exceeded"}
    assert len((await client.files.list()).data) == 2 - len(refused)
    assert await site.files.reserved_bytes("both") == (2 - len(refused), 1000 * (2 - len(refused)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "73h"}, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
    ],
)
async def test_a_wrong_field_is_named(ingress: MakeIngress, fields: dict[str, Any], param: str) -> None:
    client = ingress().client()
    with pytest.raises(BadRequestError) as refused:
        await begin(client, lines("a"), **fields)
    assert refused.value.param == param


async def test_output_is_no_input_and_a_file_lives_as_long_as_its_batch(ingress: MakeIngress) -> None:
    client = ingress().client()
    done = await ended(client, (await begin(client, lines("a"))).id)
    with pytest.raises(BadRequestError, match="purpose 'batch_output'"):
        await begin_of(client, done.output_file_id)
    short: Any = {"anchor": "created_at", "seconds": 3600}
    file = await client.files.create(file=lines("a"), purpose="batch", expires_after=short)
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(BadRequestError, match="expires before"):
        await begin_of(client, file.id)


async def test_a_request_that_is_repeated_starts_one_batch(ingress: MakeIngress) -> None:
    client = ingress().client()
    file = await client.files.create(file=lines("a"), purpose="batch")
    wanted: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    headers = {"Idempotency-Key": "once"}
    first = await client.batches.create(**wanted, extra_headers=headers)
    assert (await client.batches.create(**wanted, extra_headers=headers)).id == first.id
    with pytest.raises(Exception, match="another body"):
        await client.batches.create(**wanted | {"completion_window": "2h"}, extra_headers=headers)


@pytest.mark.parametrize("obstacle", ["its input is gone", "too many are open", "the store is full"])
async def test_a_request_that_is_repeated_has_its_batch_although_none_could_be_started(
    ingress: MakeIngress, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = ingress()
    client = site.client(obstacle)
    file = await client.files.create(file=lines("a"), purpose="batch")
    wanted: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    headers = {"Idempotency-Key": "once more"}
    first = await client.batches.create(**wanted, extra_headers=headers)
    await ended(client, first.id)
    if obstacle == "its input is gone":
        await client.files.delete(file.id)
    elif obstacle == "too many are open":
        monkeypatch.setattr("cluster.batches.runner.MAX_OPEN_OF_TENANT", 0)
    else:
        site.is_full = True
    assert (await client.batches.create(**wanted, extra_headers=headers)).id == first.id
    with pytest.raises((NotFoundError, RateLimitError, InternalServerError)):
        await client.batches.create(**wanted)
    with pytest.raises(UnprocessableEntityError, match="another body"):
        await client.batches.create(**wanted | {"completion_window": "2h"}, extra_headers=headers)


async def test_the_open_batches_of_a_tenant_are_bounded(ingress: MakeIngress) -> None:
    site = ingress()
    site.replicas.free = 0
    client = site.client("many")
    file = await client.files.create(file=lines("a"), purpose="batch")
    for _ in range(MAX_OPEN_OF_TENANT):
        await begin_of(client, file.id)
    with pytest.raises(RateLimitError):
        await begin_of(client, file.id)
    page = await client.batches.list(limit=20)
    assert len(page.data) == 20 and page.has_more
    site.replicas.gate.set()


@pytest.mark.parametrize(
    ("form", "status", "param"),
    [
        ({"data": {"purpose": "batch", "file": "x"}, "files": {"other": b""}}, 400, "file"),
        ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, 400, "purpose"),
        ({"data": {"purpose": "batch"}, "files": {"file": b""}}, 400, "file"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"x" * 5000}}, 413, "file"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"x" * (1 << 18)}}, 413, "file"),
        ({"data": BRIEF, "files": {"file": b"x"}}, 400, "expires_after.seconds"),
        ({"json": {}}, 415, None),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, None),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}}, 400, None),
    ],
)  # fmt: skip
async def test_a_wrong_upload_is_refused(ingress: MakeIngress, form: Any, status: int, param: str | None) -> None:
    site = ingress(max_file_bytes=4096)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(site.app), base_url="http://site") as client:
        answer = await client.post("/v1/files", **form)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


async def test_an_upload_that_its_client_breaks_off_is_no_error_of_the_server(
    ingress: MakeIngress, caplog: pytest.LogCaptureFixture
) -> None:
    site = ingress()
    begun = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nhalf of it'
    messages = [{"type": "http.request", "body": begun, "more_body": True}, {"type": "http.disconnect"}]
    statuses: list[int] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "query_string": b"", "headers": headers}
    await site.app(scope, receive, send)
    assert statuses == [499]
    assert not caplog.records


async def test_a_tenant_with_slow_uploads_keeps_no_other_out(ingress: MakeIngress) -> None:
    """Two slow uploads of one tenant; its third is refused, and another tenant's is stored."""
    site, begun, goes_on = ingress(), asyncio.Semaphore(0), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"--x\r\n"
        begun.release()
        await goes_on.wait()

    form = {"content-type": "multipart/form-data; boundary=x"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(site.app), base_url="http://site") as client:

        async def upload(tenant: str) -> httpx.Response:
            sent = {"data": {"purpose": "batch"}, "files": {"file": b"{}\n"}}
            return await client.post("/v1/files", headers={"tenant": tenant}, **sent)

        slow_ones = [
            asyncio.create_task(client.post("/v1/files", content=slow(), headers={**form, "tenant": "slow"}))
            for _ in range(MAX_TENANT_UPLOADS)
        ]
        for _ in slow_ones:
            await begun.acquire()
        refused, stored = await upload("slow"), await upload("other")
        goes_on.set()
        ended = await asyncio.gather(*slow_ones)
        again = await upload("slow")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_concurrency")
    assert refused.headers["retry-after"]
    assert (stored.status_code, again.status_code) == (200, 200), (stored.text, again.text)
    assert {one.status_code for one in ended} == {400}
