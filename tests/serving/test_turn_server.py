"""A turn between an ingress's client and a replica's server, over a real connection."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

import httpx
import pytest

from cluster.core.errors import BadRequest, HttpError, Overloaded, ReplicaGone, ReplicaLost, UpstreamFailed
from cluster.core.frames import TURN_PATH, Answer, TurnCall
from cluster.core.stream import Progress, StreamChunk
from cluster.core.turn_address import TurnAddress
from cluster.dispatch.turn_client import TurnAnswers, TurnClient
from replicas.turn_server import TurnServer
from tests.waiting import WITHIN_S, until

CALL = TurnCall("chat", {"stream": True}, {"x-request-id": "r"}, "default/p", "identity", 3)
HOST = "127.0.0.1"


def event(number: int, size: int = 0) -> StreamChunk[bytes]:
    return StreamChunk(Progress(events=1), f"data: {number}{'x' * size}\n\n".encode())


class Replica:
    """Answers each call with what `answer` yields, and remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[TurnCall] = []
        self.sent = self.cancelled = 0
        self.go_on = asyncio.Event()
        self.answer: Callable[[], AsyncGenerator[Answer]] = self.events

    async def events(self) -> AsyncGenerator[Answer]:
        for number in range(3):
            yield event(number)

    async def slow(self) -> AsyncGenerator[Answer]:
        yield event(0)
        await self.go_on.wait()
        yield event(1)

    async def endless(self) -> AsyncGenerator[Answer]:
        while True:
            yield event(self.sent, size=10_000)
            self.sent += 1

    async def __call__(self, call: TurnCall) -> AsyncGenerator[Answer]:
        self.calls.append(call)
        answer = self.answer()
        try:
            async for piece in answer:
                yield piece
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            await answer.aclose()


@pytest.fixture
async def replica() -> Replica:
    return Replica()


@pytest.fixture
async def server(replica: Replica) -> AsyncIterator[TurnServer]:
    server = TurnServer(replica, max_turns=2, max_waiting=1)
    await server.start(HOST)
    yield server
    replica.go_on.set()
    async with asyncio.timeout(WITHIN_S):
        await server.aclose()


@pytest.fixture
async def client() -> AsyncIterator[TurnClient]:
    client = TurnClient()
    yield client
    await client.aclose()


Ask = Callable[[], TurnAnswers]


@pytest.fixture
def ask(server: TurnServer, client: TurnClient) -> Ask:
    return lambda: to(client, server.address)


def to(client: TurnClient, address: TurnAddress, ended: list[str] | None = None) -> TurnAnswers:
    async def find() -> TurnAddress:
        return address

    return client.call(CALL, find, lambda: None if ended is None else ended.append("ended"))


async def test_a_call_and_its_answer(ask: Ask, replica: Replica) -> None:
    assert [piece async for piece in ask()] == [event(0), event(1), event(2)]
    assert replica.calls == [CALL]


async def test_a_piece_comes_before_the_next_is_made(ask: Ask, replica: Replica) -> None:
    replica.answer = replica.slow
    answers = ask()
    assert await anext(answers) == event(0)
    replica.go_on.set()
    assert [piece async for piece in answers] == [event(1)]


async def test_turns_share_a_connection_one_after_the_other(ask: Ask, client: TurnClient) -> None:
    for _ in range(5):
        _ = [piece async for piece in ask()]
    assert client._session is not None and client._session.connector is not None
    assert sum(map(len, client._session.connector._conns.values())) == 1  # type: ignore[attr-defined]


async def test_the_end_is_told_once(server: TurnServer, client: TurnClient, replica: Replica) -> None:
    ended: list[str] = []
    answers = to(client, server.address, ended)
    _ = [piece async for piece in answers]
    answers.cancel()
    assert ended == ["ended"]
    cancelled = to(client, server.address, ended)
    cancelled.cancel()
    assert [piece async for piece in cancelled] == []
    assert ended == ["ended", "ended"]
    assert len(replica.calls) == 1


async def test_who_goes_away_stops_the_replica(ask: Ask, replica: Replica) -> None:
    replica.answer = replica.slow
    answers = ask()
    await anext(answers)
    answers.cancel()
    await until(lambda: replica.cancelled)


async def test_a_slow_reader_stops_its_own_turn_only(ask: Ask, replica: Replica) -> None:
    replica.answer = replica.endless
    slow = ask()
    await anext(slow)
    before = -1
    while replica.sent != before:  # the buffers fill
        before = replica.sent
        await asyncio.sleep(0.2)
    assert replica.sent * 10_000 < 64 << 20
    replica.answer = replica.events
    async with asyncio.timeout(WITHIN_S):
        assert len([piece async for piece in ask()]) == 3
    slow.cancel()
    await until(lambda: replica.cancelled)


async def test_turns_above_the_limit_wait_in_their_order_and_one_more_is_rejected(
    ask: Ask, replica: Replica, server: TurnServer
) -> None:
    replica.answer = replica.slow
    running = [ask(), ask()]
    for answers in running:
        await anext(answers)
    waiting = asyncio.ensure_future(anext(ask()))
    await until(lambda: server._waiting)
    rejection = await anext(ask())
    assert isinstance(rejection, Overloaded) and rejection.retry_after_s
    assert not waiting.done()
    running[0].cancel()
    async with asyncio.timeout(WITHIN_S):
        assert await waiting == event(0)
    assert len(replica.calls) == 3


async def test_a_turn_that_waits_and_gives_up_is_never_served(ask: Ask, replica: Replica, server: TurnServer) -> None:
    replica.answer = replica.slow
    running = [ask(), ask()]
    for answers in running:
        await anext(answers)
    given_up = asyncio.ensure_future(anext(ask()))
    await until(lambda: server._waiting)
    given_up.cancel()
    await until(lambda: not server._waiting)
    replica.go_on.set()
    for answers in running:
        assert [piece async for piece in answers] == [event(1)]
    await asyncio.sleep(0.05)
    assert len(replica.calls) == 2


async def test_an_error_of_the_replica_arrives(ask: Ask, replica: Replica) -> None:
    async def refused() -> AsyncGenerator[Answer]:
        yield BadRequest("no such thing", param="prompt")

    replica.answer = refused
    [error] = [piece async for piece in ask()]
    assert isinstance(error, HttpError)
    assert (error.status, error.param, error.message) == (400, "prompt", "no such thing")


async def test_a_replica_that_does_not_listen_is_gone(server: TurnServer, client: TurnClient) -> None:
    ended: list[str] = []
    nobody = replace(server.address, port=1)
    with pytest.raises(ReplicaGone):
        await anext(to(client, nobody, ended))
    assert ended == ["ended"]


@pytest.mark.parametrize("piece", [b"", b"\0\0\0\x09\x93"], ids=["between frames", "within a frame"])
async def test_a_connection_that_breaks_loses_the_replica(client: TurnClient, piece: bytes) -> None:
    """A dead process's kernel closes its connections: the answer ends without the last chunk."""

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        if piece:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await writer.drain()
        writer.close()

    dying = await asyncio.start_server(die, HOST, 0)
    async with dying:
        port = dying.sockets[0].getsockname()[1]
        with pytest.raises(ReplicaLost) as lost:
            await anext(to(client, TurnAddress(HOST, port, "token")))
    assert lost.value.at_work


async def test_an_answer_that_ends_within_a_frame_loses_the_replica(client: TurnClient) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n\0\0\0\x09\x93")
        writer.close()

    async with await asyncio.start_server(die, HOST, 0) as dying:
        port = dying.sockets[0].getsockname()[1]
        with pytest.raises(ReplicaLost):
            await anext(to(client, TurnAddress(HOST, port, "token")))


async def test_only_who_has_the_token_is_served(server: TurnServer, client: TurnClient, replica: Replica) -> None:
    address = server.address
    for stranger in (b"Bearer", b"Bearer " + b"x" * 43, b"Bearer \xff"):
        async with httpx.AsyncClient() as http:
            headers = {b"authorization": stranger}
            answer = await http.post(f"http://{address.host}:{address.port}{TURN_PATH}", headers=headers)
            assert answer.status_code == 401
    with pytest.raises(UpstreamFailed):
        await anext(to(client, replace(address, token="wrong")))
    assert replica.calls == []
    assert address.token not in repr(address)


async def test_what_is_no_call_is_rejected(server: TurnServer) -> None:
    address = server.address
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {address.token}"}) as http:
        url = f"http://{address.host}:{address.port}"
        assert b"BadRequest" in (await http.post(url + TURN_PATH, content=b"\xc1")).content
        assert (await http.get(url + TURN_PATH)).status_code == 405
        assert (await http.post(url + "/other")).status_code == 404


async def test_a_replica_that_stops_waits_for_its_open_turns(client: TurnClient, replica: Replica) -> None:
    server = TurnServer(replica, max_turns=8, max_waiting=None)
    await server.start(HOST)
    replica.answer = replica.slow
    answers = to(client, server.address)
    assert await anext(answers) == event(0)
    stopping = asyncio.create_task(server.aclose())
    await asyncio.sleep(0.05)
    assert not stopping.done()
    replica.go_on.set()
    assert [piece async for piece in answers] == [event(1)]
    async with asyncio.timeout(WITHIN_S):
        await stopping
    with pytest.raises(ReplicaGone):
        await anext(to(client, server.address))
