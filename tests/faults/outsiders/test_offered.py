"""The burst's client itself: nobody who was not answered may be missing from what it counts."""

import socket
from collections import Counter
from threading import Thread

from under_load import Outcome

from outsiders.offered import burst

ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
    b"",
)
"""Of four connections one each, the last of them closed; the fifth hears nothing."""


def test_whoever_is_not_answered_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        links: list[socket.socket] = []

        def serve() -> None:
            for _ in range(len(ANSWERS) + 1):
                links.append(server.accept()[0])
            for link, answer in zip(links, ANSWERS, strict=False):
                link.recv(65536)  # what is closed with something unread is reset
                link.sendall(answer)
                link.close()

        serving = Thread(target=serve, daemon=True)
        serving.start()
        ended, took_s = burst(server.getsockname()[1], "Bearer nobody", len(ANSWERS) + 1, within_s=0.5)
        serving.join()
        links[-1].close()
    assert Counter(one.outcome for one in ended) == {
        Outcome.DONE: 1,
        Outcome.REFUSED: 1,
        Outcome.ERROR: 1,
        Outcome.LOST: 2,
    }
    assert [one.retry_after for one in ended if one.outcome is Outcome.REFUSED] == ["3"]
    assert took_s >= 0.5


def test_a_connection_that_is_reset_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            server.accept()[0].close()  # nothing of what was asked has been read: a reset

        serving = Thread(target=serve, daemon=True)
        serving.start()
        ended, _ = burst(server.getsockname()[1], "Bearer nobody", 1, within_s=5.0)
        serving.join()
    assert [one.outcome for one in ended] == [Outcome.LOST]
