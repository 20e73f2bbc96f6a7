"""The burst's client itself: nobody who was not answered may be missing from what it counts."""

import socket
from collections import Counter
from threading import Thread

import pytest

from tests.faults.outsiders.offered import burst, latencies_of_all
from tests.faults.under_load import Ended, Outcome

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


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.REFUSED, Outcome.ERROR])
def test_latencies_are_of_clients_that_were_all_answered(outcome: Outcome) -> None:
    served = Ended(Outcome.DONE, 200, "", 0.5, 0.5)
    assert latencies_of_all([served, served]) == [0.5, 0.5]
    with pytest.raises(AssertionError, match="1 of 2 were not answered"):
        latencies_of_all([served, Ended(outcome, 503, "", 0.1, 0.1)])
    with pytest.raises(AssertionError):
        latencies_of_all([])


def test_a_connection_that_is_reset_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            server.accept()[0].close()  # nothing of what was asked has been read: a reset

        serving = Thread(target=serve, daemon=True)
        serving.start()
        ended, _ = burst(server.getsockname()[1], "Bearer nobody", 1, within_s=5.0)
        serving.join()
    assert [one.outcome for one in ended] == [Outcome.LOST]
