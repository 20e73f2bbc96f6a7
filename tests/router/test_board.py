"""The board: what routers' threads publish reaches the placers' event loops, whole and in order; junk is nothing."""

import asyncio
import threading

from front_views import snapshot

from router.board import Board


async def test_a_subscriber_gets_what_is_there_and_what_comes_in_its_own_loop():
    board, seen, threads = Board(), [], set()
    board.publish("d", [("r0", snapshot("r0", 1).encode())])

    def look(view):
        threads.add(threading.get_ident())
        seen.append({replica: said and said.number for replica, said in view.items()})

    end = board.subscribe("d", look)

    def publish():
        for number in range(2, 50):
            board.publish("d", [("r0", snapshot("r0", number).encode()), ("r1", None)])

    await asyncio.to_thread(publish)
    await asyncio.sleep(0)
    assert seen == [{"r0": 1}, *({"r0": number, "r1": None} for number in range(2, 50))]
    assert threads == {threading.get_ident()}
    end()
    board.publish("d", [])
    await asyncio.sleep(0)
    assert len(seen) == 49
    assert board.view("d") == {}


async def test_deployments_do_not_meet():
    board, seen = Board(), []
    board.subscribe("a", seen.append)
    board.publish("b", [("r", None)])
    await asyncio.sleep(0)
    assert seen == [{}]


def test_junk_is_nothing_and_counted_once_while_it_stays():
    board = Board()
    for junk in (b"", b"\xc1", b"\x80", {"running": 1}, "text", 7, snapshot("r", 1).encode()[:-1]):
        for _ in range(3):
            board.publish("d", [("r", junk), ("new", None)])
        assert board.view("d") == {"r": None, "new": None}
    assert board.junk == 7
    board.publish("d", [("r", snapshot("r", 2).encode())])
    assert board.view("d")["r"] == snapshot("r", 2)


def test_a_subscriber_whose_loop_has_ended_is_no_trouble():
    board = Board()

    async def subscribe() -> None:
        board.subscribe("d", lambda view: None)

    asyncio.run(subscribe())
    board.publish("d", [("r", None)])
    assert board.view("d") == {"r": None}
