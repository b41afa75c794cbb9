"""A page that follows runs while they go on: a file that is rewritten, or a server of this machine.

The server listens on 127.0.0.1 only, and answers only where the address has its random token, so
that neither another machine nor another user's program finds the page by its port.
"""

import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mesotron.report.tournament import is_finished, is_tournament

EVERY = 10.0  # seconds between updates
LOOPBACK = "127.0.0.1"
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Render = Callable[[float | None], str]  # the page; with seconds, one that loads itself anew


def follow(paths: Sequence[Path], write: Callable[[float | None], None], out: Path) -> int:
    """Rewrite the page whenever something changes, until every run is over or Ctrl-C."""
    print(f"{out}: updated every {EVERY:g} s while the runs go on; Ctrl-C ends it")
    before = None
    try:
        while True:
            now = [stamp(path) for path in paths]
            over = all(is_over(path) for path in paths)
            if now != before or over:
                write(None if over else EVERY)

            if over:
                print("all runs are over")
                return 0

            before = now
            time.sleep(EVERY)
    except KeyboardInterrupt:
        write(None)
        return 0


def serve(paths: Sequence[Path], render: Render, port: int) -> int:
    """Serve the page until Ctrl-C."""
    server = PageServer(paths, render, port)
    print(f"{server.address}: follows the run; Ctrl-C ends it", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()

    server.server_close()
    return 0


class PageServer(ThreadingHTTPServer):
    """One page at http://127.0.0.1:PORT/TOKEN/, rendered anew when a file of a run has changed."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], render: Render, port: int) -> None:
        self.paths = paths
        self.render = render
        self.token = secrets.token_urlsafe(16)
        self.lock = threading.Lock()
        self.rendered: tuple[object, bytes] | None = None  # of these stamps, this page

        try:
            super().__init__((LOOPBACK, port), PageHandler)
        except (OSError, OverflowError) as error:
            reason = error.args[-1]
            raise ValueError(f"--port {port}: {reason}; 0 takes any free port") from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away while it is answered is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def page(self) -> bytes:
        with self.lock:
            over = all(is_over(path) for path in self.paths)
            now = (over, [stamp(path) for path in self.paths])
            if self.rendered is None or self.rendered[0] != now:
                page = self.render(None if over else EVERY)
                self.rendered = (now, page.encode())

            return self.rendered[1]


class PageHandler(BaseHTTPRequestHandler):
    timeout = 10  # seconds, of a client that says nothing

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, PageServer)

        if not secrets.compare_digest(self.path.encode(), f"/{server.token}/".encode()):
            self.send_error(404)
            return

        try:
            page = server.page()
        except (OSError, ValueError) as error:  # a file that is just being written or moved
            self.send_error(503, explain=str(error))
            return

        self.send_response(200)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are no news."""


def stamp(path: Path) -> list[tuple[str, int, int]]:
    """What changes when a run goes on: sizes and times of its files."""
    if not path.exists():  # one run of a file with several
        path = Path(str(path).partition("#")[0])

    files = [path]
    if not path.is_file():
        files = sorted([*path.glob("*.json*"), *path.glob("cells/*/metrics.jsonl")])

    stamps = []
    for file in files:
        if file.name.startswith("."):
            continue

        with suppress(FileNotFoundError):
            facts = file.stat()
            stamps.append((str(file), facts.st_size, facts.st_mtime_ns))

    return stamps


def is_over(path: Path) -> bool:
    if is_tournament(path):
        return is_finished(path)

    return (path / "result.json").is_file()
