"""Alerts: what the watch finds, sent to a webhook, Slack, Discord, ntfy, a program (as JSON on its
standard input), or the active run of W&B or trackio.

URLs and topics are passwords: give them as environment variables (`slack:$SLACK_URL`). Each channel
sends in a thread of its own, at most `TIMEOUT` seconds per alert; whatever goes wrong there is
logged once and stops nothing, neither training nor another channel.
"""

import contextvars
import html
import http.client
import json
import logging
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mesotron.config import check_alert
from mesotron.watch.detectors import Event

TIMEOUT = 10.0  # seconds for one alert to one channel
QUIET = 600.0  # seconds until the same finding is sent again
HOUR = 3600
MOST_PER_HOUR = 20
MOST_QUEUED = 100
SCHEMA = "mesotron.alert/1"
STATES = {
    "stop": "is dead",
    "warn": "shows signs of trouble",
    "clear": "has recovered",
}
COLORS = {"stop": 0xD62728, "warn": 0xFFBF00, "clear": 0x2CA02C}
LEVELS = {"stop": "ERROR", "warn": "WARN", "clear": "INFO"}
PRIORITIES = {"stop": "5", "warn": "4", "clear": "3"}
WITH_ADDRESS = ("webhook", "slack", "discord", "ntfy")
JSON = {"Content-Type": "application/json"}
log = logging.getLogger("mesotron.watch")

Payload = dict[str, Any]


class Alerts:
    """Sends events of the watch to channels, each from a thread of its own."""

    def __init__(
        self,
        channels: Sequence[str],
        *,
        run: str = "",  # its name
        link: str = "",  # address of its page; a file is named once it exists
        price: float | None = None,  # dollars per hour of the machine: what a dead run loses
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.channels = [Channel(text) for text in channels]
        self.run = run
        self.link = link
        self.price = price
        self.clock = clock
        self._sent: dict[str, float] = {}  # finding -> when
        self._times: list[float] = []

    def send(self, event: Event) -> bool:
        """Queue an event and return at once; False if it was sent lately or too many were."""
        now = self.clock()
        if not self._is_due(event, now):
            return False

        payload = self.payload(event)
        queued = [channel.queue(payload) for channel in self.channels]
        if self.channels and not any(queued):
            return False

        self._sent[_finding(event)] = now
        self._times.append(now)

        return True

    def _is_due(self, event: Event, now: float) -> bool:
        self._times = [at for at in self._times if now - at < HOUR]
        if len(self._times) >= MOST_PER_HOUR:
            return False

        last = self._sent.get(_finding(event), -QUIET)
        if now - last < QUIET:
            return False
        if event.severity != "clear":
            return True

        # The end of what was never sent is no news.
        findings = (f"{event.detector} warn", f"{event.detector} stop")
        return any(finding in self._sent for finding in findings)

    def close(self, timeout: float = TIMEOUT / 2) -> None:
        """Wait for what is queued, at most `timeout` seconds in all."""
        end = time.monotonic() + timeout
        for channel in self.channels:
            channel.stop()

        for channel in self.channels:
            if not channel.has_stopped(end - time.monotonic()):
                log.warning(f"an alert to {channel.kind} was not sent within {timeout:g} s")

    def payload(self, event: Event) -> Payload:
        """An event as the JSON that webhooks and commands get."""
        fields = asdict(event)
        del fields["confidence"]

        link = self._page()
        lost = self.price if event.severity == "stop" else None

        return {
            "schema": SCHEMA,
            "run": self.run,
            "title": f"{self.run or 'The run'} {STATES[event.severity]}: {event.title}",
            "text": _text_of(event, lost, link),
            **fields,
            "dollars_per_hour": lost,
            "link": link or None,
        }

    def _page(self) -> str:
        """Address of the run's page, if it has one."""
        is_there = "://" in self.link or Path(self.link).is_file()
        return self.link if is_there else ""


def _finding(event: Event) -> str:
    return f"{event.detector} {event.severity}"


def _text_of(event: Event, lost: float | None, link: str) -> str:
    """What happened, line by line."""
    lines = [f"{event.diagnosis[:1].upper()}{event.diagnosis[1:]}."]
    if event.began is not None:
        lines.append(f"Step {event.step}; began at step {event.began}.")
    if event.evidence:
        evidence = ", ".join(item.text() for item in event.evidence)
        lines.append(f"Evidence: {evidence}.")
    if lost:
        lines.append(f"Each further hour costs ${lost:.2f}.")
    if event.severity != "clear":
        lines.append(f"What to do: {event.remedy}.")
    if link:
        lines.append(link)

    return "\n".join(lines)


class Channel:
    """Where alerts go, as in "slack:$SLACK_URL", and the thread that sends them."""

    def __init__(self, text: str) -> None:
        self.kind, self.target = check_alert(text)
        self.failed = False
        self._queue: queue.Queue[Payload | None] = queue.Queue(maxsize=MOST_QUEUED)
        self._thread: threading.Thread | None = None
        if self.kind in WITH_ADDRESS:
            self.url()  # a mistake shows at the start, not when the run is dying

    def queue(self, payload: Payload) -> bool:
        """Have it sent soon; False if too many are waiting."""
        try:
            self._queue.put_nowait(payload)
        except queue.Full:
            return False

        if self._thread is None:
            # trackio's active run belongs to the context of the training thread.
            run = contextvars.copy_context().run
            self._thread = threading.Thread(target=run, args=(self._work,), daemon=True)
            self._thread.start()

        return True

    def stop(self) -> None:
        """End the thread once everything is sent."""
        with suppress(queue.Full):
            self._queue.put_nowait(None)

    def has_stopped(self, timeout: float) -> bool:
        thread = self._thread
        self._thread = None
        if thread is None:
            return True

        thread.join(max(timeout, 0.0))
        return not thread.is_alive()

    def _work(self) -> None:
        while (payload := self._queue.get()) is not None:
            try:
                self.send(payload)
            except Exception as error:
                self.report(error)

    def url(self) -> str:
        """The address, from the environment; it must never be logged."""
        target = self.target
        variable = re.fullmatch(r"\$\{?(\w+)\}?", target)
        if variable:
            target = os.environ.get(variable[1], "")
            if not target:
                raise ValueError(f"alert {self.kind}:${variable[1]}: export {variable[1]} first")

        if self.kind == "ntfy" and re.fullmatch(r"[-\w]{1,64}", target, re.ASCII):
            return f"https://ntfy.sh/{target}"
        if not re.match(r"https?://[\w\[]", target, re.IGNORECASE):
            raise ValueError(f"alert {self.kind}: the address in {self.target} is no http(s) URL")

        return target

    def send(self, payload: Payload) -> None:
        senders = {
            "command": self._send_to_program,
            "wandb": self._send_to_tracker,
            "trackio": self._send_to_tracker,
            "ntfy": self._send_to_ntfy,
            "slack": self._send_to_slack,
            "discord": self._send_to_discord,
            "webhook": self._post_json,
        }
        senders[self.kind](payload)

    def _send_to_program(self, payload: Payload) -> None:
        command = shlex.split(self.target)
        program = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            program.communicate(json.dumps(payload).encode(), TIMEOUT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # it, and whatever it has started
            program.wait()

        if program.returncode != 0:
            raise subprocess.CalledProcessError(program.returncode, command[0])

    def _send_to_tracker(self, payload: Payload) -> None:
        module: Any = sys.modules.get(self.kind)  # the run is active only where it was imported
        if module is None or (self.kind == "wandb" and module.run is None):
            raise LookupError(f"no run of {self.kind} is active in this process")

        title = payload["title"][:63]
        level = LEVELS[payload["severity"]]
        if self.kind == "trackio":
            module.alert(title, payload["text"], level=module.AlertLevel(level.lower()))
        else:
            module.run.alert(title, payload["text"], level=level)

    def _send_to_ntfy(self, payload: Payload) -> None:
        title = re.sub(r"[^ -~]", "?", payload["title"])  # a header is ASCII
        headers = {
            "Title": title[:200],
            "Tags": "rotating_light",
            "Priority": PRIORITIES[payload["severity"]],
        }
        self._post(payload["text"].encode(), headers)

    def _send_to_slack(self, payload: Payload) -> None:
        title = html.escape(payload["title"], quote=False)
        text = html.escape(payload["text"], quote=False)
        shown = {"type": "mrkdwn", "text": f"*{title}*\n{text}"[:2900]}
        blocks = [{"type": "section", "text": shown}]

        self._post_json({"text": title[:300], "blocks": blocks})

    def _send_to_discord(self, payload: Payload) -> None:
        embed = {
            "title": payload["title"][:250],
            "description": payload["text"][:4000],
            "color": COLORS[payload["severity"]],
        }
        self._post_json({"embeds": [embed], "allowed_mentions": {"parse": []}})

    def report(self, error: Exception) -> None:
        """Log the first failure; its text may contain the address, so it is left out."""
        if not self.failed:
            log.warning(f"an alert to {self.kind} was not sent: {_reason(error)}")
        self.failed = True

    def _post_json(self, body: Payload) -> None:
        self._post(json.dumps(body).encode(), JSON)

    def _post(self, data: bytes, headers: dict[str, str]) -> None:
        headers = {"User-Agent": "mesotron"} | headers
        request = urllib.request.Request(self.url(), data, headers, method="POST")
        with deadline_opener().open(request, timeout=TIMEOUT):
            pass  # the status says it all


# Requests that end, however slowly a server drips its answer


def deadline_opener() -> urllib.request.OpenerDirector:
    """An opener whose connections are cut `TIMEOUT` seconds after they began."""
    return urllib.request.build_opener(DeadlineHandler, SecureDeadlineHandler, NoRedirects)


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: what is posted would be dropped, and another server asked."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


class DeadlineHandler(urllib.request.HTTPHandler):
    def http_open(self, req: Any) -> Any:
        return self.do_open(DeadlineConnection, req)  # pyright: ignore[reportArgumentType]


class SecureDeadlineHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: Any) -> Any:
        return self.do_open(SecureDeadlineConnection, req)  # pyright: ignore[reportArgumentType]


class Cut:
    """Mixin for a connection of `http.client`."""

    sock: Any

    def connect(self) -> None:
        timer = threading.Timer(TIMEOUT, self._cut)
        timer.daemon = True
        timer.start()
        super().connect()  # pyright: ignore[reportAttributeAccessIssue]

    def _cut(self) -> None:
        with suppress(OSError, AttributeError):  # it may have ended, or never have begun
            self.sock.shutdown(socket.SHUT_RDWR)


class DeadlineConnection(Cut, http.client.HTTPConnection):
    pass


class SecureDeadlineConnection(Cut, http.client.HTTPSConnection):
    pass


def _reason(error: Exception) -> str:
    if isinstance(error, LookupError):
        return str(error)

    name = type(error).__name__
    if isinstance(error, urllib.error.HTTPError):
        return f"{name} {error.code}"

    return name
