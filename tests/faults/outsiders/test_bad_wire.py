"""Bytes that are no request, or hardly one: each is told so at once, in JSON, and nobody dies of it."""

import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.outsiders.guarded import KEYS, Guarded
from tests.faults.promises import percentile

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FAULT = "raw sockets: oversized, conflicting, partial"
COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": "tiny", "prompt": "Hi", "max_tokens": 1}).encode()
ANSWER_WITHIN_S = 30.0
PARTIAL_EACH = 5


def request(*headers: bytes, line: bytes = b"POST /v1/completions HTTP/1.1", body: bytes = BODY) -> bytes:
    own = (b"Host: a", b"Authorization: Bearer " + KEYS["acme"].encode(), b"Content-Type: application/json")
    return b"\r\n".join((line, *own, *headers, b"", body))


LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"

REFUSED: dict[str, bytes] = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no method": b"/v1/completions\r\n\r\n",
    "an unknown version": request(LENGTH, line=b"POST /v1/completions HTTP/7.7"),
    "an unknown method": request(LENGTH, line=b"STEAL /v1/completions HTTP/1.1"),
    "a path of bytes": request(LENGTH, line=b"POST /v1/\xff\xfe HTTP/1.1"),
    "a space in the path": request(LENGTH, line=b"POST /v1/ completions HTTP/1.1"),
    "two lengths": request(LENGTH, b"Content-Length: 5"),
    "a length and chunks": request(LENGTH, CHUNKED),
    "chunks twice": request(CHUNKED, b"Transfer-Encoding: identity"),
    "a negative length": request(b"Content-Length: -5"),
    "a length of text": request(b"Content-Length: ten"),
    "a huge length": request(b"Content-Length: " + b"9" * 40),
    "a length that is too large": request(b"Content-Length: 99999999", body=b"{"),
    "a chunk of text": request(CHUNKED, body=b"zz\r\n" + BODY),
    "a huge chunk": request(CHUNKED, body=b"ffffffffffffffffff\r\n" + BODY),
    "a header without a colon": request(LENGTH, b"nonsense"),
    "a header with a space": request(LENGTH, b"x y: z"),
    "a header with a null": request(LENGTH, b"x: a\x00b"),
    "a header that is not UTF-8": request(LENGTH, b"x: \xff\xfe"),
    "a folded header": request(LENGTH, b"x: a\r\n\tb\x00"),
    "a header too long": request(LENGTH, b"x: " + b"a" * 40_000),
    "a thousand headers": request(LENGTH, *(b"x-%d: %s" % (i, b"a" * 40) for i in range(1000))),
    "headers without an end": request()[:-4] + b"x: " + b"a" * (3 << 20),
    "no key": b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    "another's path": b"GET http://169.254.169.254/v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tunnel": b"CONNECT 127.0.0.1:6379 HTTP/1.1\r\nHost: a\r\n\r\n",
    "a WebSocket": request(
        b"Connection: Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        line=b"GET /v1/completions HTTP/1.1",
        body=b"",
    ),
    "two keys": request(LENGTH, b"Authorization: Bearer " + KEYS["other"].encode()),
    "a climbing path": request(LENGTH, line=b"POST /v1/../admin/reset HTTP/1.1"),
    "an encoded climbing path": request(LENGTH, line=b"POST /v1/%2e%2e%2fadmin/reset HTTP/1.1"),
    "a body that is no JSON": request(LENGTH, body=b"[" * len(BODY)),
}

SERVED: dict[str, bytes] = {
    "a key in two ways": request(LENGTH, b"X-Api-Key: " + KEYS["acme"].encode()),
    "two programs": request(LENGTH, b"x-session-id: a", b"x-session-id: b"),
    "a time limit of Ray's": request(LENGTH, b"x-request-timeout-seconds: 0.0001"),
    "no version, which was HTTP/0.9": request(LENGTH, line=b"POST /v1/completions"),
    "two content types": request(LENGTH, b"Content-Type: multipart/form-data"),
    "two hosts": request(LENGTH, b"Host: b"),
    "chunks": request(CHUNKED, body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)),
}
"""Odd, and served or refused: only a 5xx would be wrong."""

PARTIAL: dict[str, bytes] = {
    "nothing": b"",
    "half a line": b"POST /v1/comp",
    "half the headers": request(LENGTH)[:80],
    "half a body": request(LENGTH, body=BODY[:5]),
    "half a chunk": request(CHUNKED, body=b"5\r\nab"),
}
"""Sent, and then the connection is gone."""


@dataclass(frozen=True)
class StreamChunk:
    status: int
    is_json: bool
    took_s: float


def answer(port: int, data: bytes) -> StreamChunk:
    """The first answer on a connection of its own. The status is 0 where it was closed without one."""
    with socket.create_connection(("127.0.0.1", port), ANSWER_WITHIN_S) as link:
        began = time.perf_counter()
        with suppress(OSError):  # it is refused before its end, and the answer may be there
            link.sendall(data)
        link.settimeout(ANSWER_WITHIN_S)
        got = b""
        try:
            while b"\r\n\r\n" not in got or len(got.partition(b"\r\n\r\n")[2]) < _length(got):
                piece = link.recv(65536)
                if not piece:
                    break
                got += piece
        except ConnectionResetError:
            pass
        took_s = time.perf_counter() - began
    head, _, body = got.partition(b"\r\n\r\n")
    return StreamChunk(int(head.split()[1]) if head else 0, _is_error(body), took_s)


def _length(got: bytes) -> int:
    head = got.partition(b"\r\n\r\n")[0].lower()
    lines = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
    return int(lines[0].split(b":")[1]) if lines else 0


def _is_error(body: bytes) -> bool:
    try:
        return bool(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


def test_bytes_that_are_no_request(guarded: Guarded, promised: Any) -> None:
    before = guarded.workers()
    told = {name: answer(guarded.port, data) for name, data in REFUSED.items()}
    odd = {name: answer(guarded.port, data) for name, data in SERVED.items()}
    for data in PARTIAL.values():
        for _ in range(PARTIAL_EACH):
            with socket.create_connection(("127.0.0.1", guarded.port), 10) as link:
                link.sendall(data)
    wrong = {name: one for name, one in told.items() if not (400 <= one.status < 500 and one.is_json)}
    assert not wrong, wrong
    promised(FAULT, "answers that are not 4xx JSON", len(wrong), exactly=0)
    every = [*told.values(), *odd.values()]
    promised(FAULT, "answers 5xx", sum(one.status >= 500 for one in every), exactly=0)
    assert {name: one.status for name, one in odd.items() if one.status == 0} == {}
    promised(FAULT, "slowest refusal", max(one.took_s for one in told.values()) * 1e3, unit="ms", at_most=100)
    promised(FAULT, "p90 refusal", percentile((one.took_s for one in told.values()), 0.9) * 1e3, unit="ms", at_most=100)
    with guarded.client("acme") as client:
        assert client.post(COMPLETIONS, content=BODY, headers={"content-type": "application/json"}).status_code == 200
    promised(FAULT, "workers that died", len(before.keys() - guarded.workers().keys()), exactly=0)
