"""A hub that fails in the way that the name of a model says: org/cut, org/html, …"""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import struct
import threading
from collections.abc import Iterator

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FAULTS = (
    *("cut", "reset"),  # in the middle of a file, before an answer
    *("html", "error", "loop", "silent"),
    "sizes",  # a file is shorter than the list of files says
    "nested",  # JSON of 64 MiB that is nothing but open brackets
    "kinds",  # JSON of wrong types
    *("commit", "etag"),  # names of files that lead out of the cache
    "drip",  # a file of which one byte arrives in each DRIP_S
)
ENDLESS = ("drip",)  # no client gives up on what still arrives
DRIP_S = 0.5
OUTSIDE = "../../../../../outside"
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 100_000}
NESTED_BYTES = 64 << 20


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        fault = next((each for each in FAULTS if f"/{each}" in path), "")
        is_file = "/resolve/" in path
        if fault == "silent":
            self.server.released.wait()  # type: ignore[attr-defined]
        elif fault == "reset":
            self._reset()
        elif fault == "html":
            self._answer(b"<html>please log in</html>", {"Content-Type": "text/html"})
        elif fault == "error":
            self._answer(b"no", {}, status=500)
        elif fault == "loop":
            self._answer(b"", {"Location": self.path}, status=302)
        elif fault == "nested":
            self._answer(b"[" * NESTED_BYTES, {"Content-Type": "application/json"})
        elif fault == "kinds":
            self._answer(b'{"sha": 7, "siblings": "no", "id": []}', {})
        elif is_file:
            self._file(path, fault)
        else:
            self._list(path, fault)

    do_HEAD = do_GET  # noqa: N815

    def _list(self, path: str, fault: str) -> None:
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in FILES.items()
            ]
            self._answer(json.dumps(entries).encode(), {})
            return
        siblings = [{"rfilename": name} for name in FILES]
        body = {
            "id": "org/x",
            "sha": OUTSIDE if fault == "commit" else COMMIT,
            "siblings": siblings,
        }
        self._answer(json.dumps(body).encode(), {})

    def _file(self, path: str, fault: str) -> None:
        data = FILES[path.rpartition("/")[2]]
        etag = {"ETag": f'"{len(data):040x}"', "X-Repo-Commit": COMMIT}
        if fault == "etag":
            etag["ETag"] = f'"{OUTSIDE}"'
        if fault == "drip" and self.command == "GET":
            self._drip(data, etag)
            return
        is_whole = self.command == "HEAD" or not path.endswith(".safetensors")
        if is_whole or fault in ("etag", "commit"):
            self._answer(data, etag)
        elif fault == "sizes":
            self._answer(data[:10], etag)
        else:
            self._answer(data[: len(data) // 2], {**etag, "Content-Length": str(len(data))})
            self._reset()

    def _drip(self, data: bytes, headers: dict[str, str]) -> None:
        self._answer(b"", {**headers, "Content-Length": str(len(data))})
        with contextlib.suppress(OSError):  # the client has gone
            for byte in data:
                if self.server.released.wait(DRIP_S):  # type: ignore[attr-defined]
                    break
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
        self.close_connection = True

    def _answer(self, body: bytes, headers: dict[str, str], *, status: int = 200) -> None:
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(OSError):
                self.wfile.write(body)

    def _reset(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def faulty_hub() -> Iterator[str]:
    """Yields its URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *arguments: None  # type: ignore[method-assign]
    server.daemon_threads = True
    server.released = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.released.set()  # type: ignore[attr-defined]
        server.shutdown()
        server.server_close()


def hub_environ(url: str, home: str) -> dict[str, str]:
    seconds = {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}
    return {"HF_ENDPOINT": url, "HF_HOME": home, "HF_HUB_DISABLE_XET": "1", **seconds}
