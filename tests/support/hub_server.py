"""A hub on this machine: lists and serves the files of one repository, as the real one answers."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from support.local_server import serve

COMMIT = "0" * 40


@contextmanager
def serve_hub(repository: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """The address of a hub with one model repository."""

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{repository}"):
                siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
                info = {"id": repository, "modelId": repository, "siblings": siblings}
                self.send(200, json.dumps(info | {"sha": COMMIT}).encode(), with_body)
                return

            for name, data in files.items():
                if path == f"/{repository}/resolve/{COMMIT}/{name}" or path == (
                    f"/{repository}/resolve/main/{name}"
                ):
                    self.send(200, data, with_body)
                    return

            self.send(404, b"{}", with_body)

        def send(self, code: int, data: bytes, with_body: bool) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if code == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            if with_body:
                self.wfile.write(data)

    with serve(Hub) as address:
        yield address
