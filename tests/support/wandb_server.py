"""A server on this machine that answers W&B's client as recorded, for one run of one project."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.local_server import serve

VIEWER = {"id": "v", "username": "u", "entity": "e", "flags": "{}", "email": "", "teams": None}


@contextmanager
def serve_wandb(path: str, name: str, history: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The address of a server with the run ENTITY/PROJECT/ID."""

    class Server(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            data: dict[str, Any] = {}
            if self.path == "/graphql":
                data = {"data": answer(json.loads(body), path, name, history)}

            text = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    with serve(Server) as address:
        yield address


def answer(
    request: dict[str, Any], path: str, name: str, history: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    query = request["query"]
    variables = request.get("variables") or {}
    if "viewer" in query:
        return {"viewer": VIEWER}
    if "parquetHistory" in query:
        return in_project({"parquetHistory": {"liveData": [], "parquetUrls": []}})
    if "history(" in query:
        rows = []
        for row in history:
            if variables["minStep"] <= row["_step"] < variables["maxStep"]:
                rows.append(json.dumps(row))
        return in_project({"history": rows})

    if "run(" in query:
        asked = "/".join(str(variables.get(key)) for key in ("entity", "project", "name"))
        return in_project(describe(path, name, history) if asked == path else None)

    return {}


def in_project(run: dict[str, Any] | None) -> dict[str, Any]:
    return {"project": {"internalId": "1", "run": run}}


def describe(path: str, name: str, history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last = {"lastStep": history[-1]["_step"], "keys": {}, "sets": []}
    began = "2026-01-01T00:00:00"
    return {
        "id": "1",
        "internalId": "1",
        "name": path.rpartition("/")[2],
        "displayName": name,
        "projectId": 1,
        "project": {"id": "1", "internalId": "1"},
        "state": "finished",
        "tags": [],
        "user": {"name": "u", "username": "u"},
        "config": "{}",
        "systemMetrics": "{}",
        "summaryMetrics": "{}",
        "historyLineCount": len(history),
        "historyKeys": last,
        "createdAt": began,
        "heartbeatAt": began,
        "readOnly": False,
        "group": None,
        "jobType": None,
        "sweepName": None,
        "commit": None,
        "description": None,
        "notes": None,
    }
