"""A server that answers as Grafana's HTTP API is documented to, for what `caesura dashboards` asks of it."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "glsa_abc"
USER = ("admin", "secret")


class SmallGrafana:
    """Folders and dashboards in memory."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        """By uid: `dashboard` and its `folderUid`."""
        self.writes = 0

    def answer(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        match method, path.removeprefix("/api/").split("/"):
            case "GET", ["dashboards", "uid", uid] if uid in self.dashboards:
                stored = self.dashboards[uid]
                return 200, {"meta": {"folderUid": stored["folderUid"]}, "dashboard": stored["dashboard"]}
            case "GET", ["dashboards", "uid", _]:
                return 404, {"message": "Dashboard not found"}
            case "GET", ["folders", uid] if uid in self.folders:
                return 200, {"uid": uid, "title": self.folders[uid]}
            case "GET", ["folders", _]:
                return 404, {"message": "folder not found"}
            case "POST", ["folders"] if body is not None:
                self.writes += 1
                self.folders[body["uid"]] = body["title"]
                return 200, {"uid": body["uid"], "title": body["title"]}
            case "POST", ["dashboards", "db"] if body is not None:
                return self._store(body)
        return 404, {"message": "Not found"}

    def _store(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        dashboard = body["dashboard"]
        if body["folderUid"] not in self.folders:
            return 400, {"message": "folder not found"}
        before = self.dashboards.get(dashboard["uid"], {}).get("dashboard")
        if before is not None and not body["overwrite"]:
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        version = 1 if before is None else before["version"] + 1
        self.writes += 1
        self.dashboards[dashboard["uid"]] = {
            "dashboard": {**dashboard, "id": len(self.dashboards) + 1, "version": version},
            "folderUid": body["folderUid"],
        }
        return 200, {"uid": dashboard["uid"], "status": "success", "version": version}


@contextmanager
def small_grafana(path: str = "") -> Iterator[tuple[SmallGrafana, str]]:
    """The server and its URL; ``path`` is what it is served under, as behind a proxy."""
    grafana = SmallGrafana()
    basic = base64.b64encode(":".join(USER).encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: dict[str, Any] | None) -> None:
            if self.headers.get("authorization") not in (f"Bearer {TOKEN}", f"Basic {basic}"):
                status, told = 401, {"message": "Invalid API key"}
            elif not self.path.startswith(f"{path}/api/"):
                status, told = 404, {"message": "Not found"}
            else:
                status, told = grafana.answer(self.command, self.path.removeprefix(path), body)
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield grafana, f"http://127.0.0.1:{server.server_port}{path}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
