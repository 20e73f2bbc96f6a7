"""A seat: its Deployment's size, which KEDA decides, is the number of replicas that is wanted.

Seats count themselves by the addresses behind their Service's name; the one with the lowest reports to Ray Serve.
A lower count is reported only after it has stayed lower, because a seat that moves to another node is not one less.
"""

import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

APPLICATION = "caesura"
PERIOD_S = 5.0
TIMEOUT_S = 10.0
LOWER_AFTER = 12
"""Counts in a row that are lower before it is reported: a minute."""


@dataclass
class Wanted:
    """How many replicas are wanted, by the seats that were counted."""

    at_least: int
    at_most: int
    told: int = 0
    lower: int = 0

    def after(self, seats: int) -> int:
        """What to tell after this count."""
        count = min(max(seats, self.at_least), self.at_most)
        self.lower = self.lower + 1 if count < self.told else 0
        if count >= self.told or self.lower >= LOWER_AFTER:
            self.told, self.lower = count, 0
        return self.told


def addresses(name: str) -> list[str]:
    """Of all seats, in an order on which they agree."""
    return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET)})


def call(url: str, body: dict[str, int] | None = None) -> dict[str, Any]:
    """JSON of the dashboard."""
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data=data, headers=headers), timeout=TIMEOUT_S) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def scale(dashboard: str, deployment: str, replicas: int) -> bool:
    """Make the deployment's target this; False if it was already."""
    told = call(f"{dashboard}/api/serve/applications/")
    now = told["applications"][APPLICATION]["deployments"][deployment]["target_num_replicas"]
    if now == replicas:
        return False
    path = f"/api/v1/applications/{APPLICATION}/deployments/{quote(deployment, safe='')}/scale"
    call(dashboard + path, {"target_num_replicas": replicas})
    print(f"{deployment}: {now} -> {replicas}", flush=True)
    return True


def main() -> None:
    """Count and tell, for ever."""
    here, seats = os.environ["POD_IP"], os.environ["SEATS"]
    wanted = Wanted(int(os.environ["AT_LEAST"]), int(os.environ["AT_MOST"]))
    while True:
        try:
            there = addresses(seats)
            replicas = wanted.after(len(there))
            if there[0] == here:
                scale(os.environ["DASHBOARD"], os.environ["DEPLOYMENT"], replicas)
        except (URLError, OSError, KeyError, ValueError) as error:
            # The cluster starts, moves or ends; the last report stands.
            print(f"not told: {type(error).__name__}: {error}", flush=True)
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
