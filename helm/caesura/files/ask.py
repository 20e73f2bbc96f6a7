"""`helm test`: is it ready, and does a model answer? Arguments: URL, model."""

import json
import os
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

READY_WITHIN_S = 600.0
ANSWER_WITHIN_S = 120.0


def main(url: str, model: str) -> None:
    """Ask; an exception is the test's failure."""
    end_s = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            with urlopen(f"{url}/ready", timeout=10) as answer:
                print("ready:", answer.read().decode())
                break
        except (URLError, OSError):
            if time.monotonic() > end_s:
                raise
            time.sleep(5)
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("CAESURA_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=ANSWER_WITHIN_S) as answer:
        told = json.load(answer)
    tokens = told["usage"]["completion_tokens"]
    if not tokens:
        raise SystemExit(f"no token was generated: {told}")
    print(f"{model}: {tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
