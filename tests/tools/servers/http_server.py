"""A real HTTP server for the tests; prints its port."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

COUNTS: dict[str, int] = {}


class Handler(BaseHTTPRequestHandler):
    """One path for each behaviour."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Type": "text/plain", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        COUNTS[path] = COUNTS.get(path, 0) + 1
        if path == "/big":
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            for _ in range(int(query["mb"][0])):
                self.wfile.write(b"x" * (1 << 20))
            self.close_connection = True
        elif path == "/slow":
            time.sleep(float(query["s"][0]))
            self.answer(200, b"slept")
        elif path == "/flaky":
            self.answer(503 if COUNTS[path] < 3 else 200, str(COUNTS[path]).encode())
        elif path == "/redirect":
            self.answer(int(query.get("status", ["302"])[0]), b"", Location=query["to"][0])
        elif path == "/lost":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")
            self.close_connection = True
        elif path == "/gzip":
            self.answer(200, b"\x1f\x8b", Content_Encoding="gzip")
        elif path == "/image":
            self.answer(200, b"\x89PNG", Content_Type="image/png")
        elif path == "/charset":
            content_type = query["type"][0]
            self.answer(200, bytes.fromhex(query["hex"][0]), Content_Type=content_type)
        elif path == "/openapi.json":
            self.answer(200, OPENAPI.encode(), Content_Type="application/json")
        elif path == "/teapot":
            self.answer(418, b"short and stout")
        else:
            seen = {
                "method": self.command,
                "path": self.path,
                "headers": {name.lower(): value for name, value in self.headers.items()},
                "body": body.decode(),
            }
            self.answer(200, json.dumps(seen).encode(), Content_Type="application/json")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET


OPENAPI = json.dumps(
    {
        "openapi": "3.1.0",
        "servers": [{"url": "/api"}],
        "paths": {
            "/items/{id}": {
                "parameters": [{"$ref": "#/components/parameters/id"}],
                "put": {
                    "operationId": "putItem",
                    "summary": "Change an item.",
                    "parameters": [
                        {"name": "dry", "in": "query", "schema": {"type": "boolean"}},
                        {"name": "X-Trace", "in": "header", "schema": {"type": "string"}},
                    ],
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Item"}}},
                    },
                },
            }
        },
        "components": {
            "parameters": {"id": {"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}},
            "schemas": {
                "Item": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}, "parent": {"$ref": "#/components/schemas/Item"}},
                }
            },
        },
    }
)

if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    sys.exit(server.serve_forever())
