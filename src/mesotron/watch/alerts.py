"""Alerts: what the watch finds, sent to a webhook, Slack, Discord, ntfy, a program (as JSON on its
standard input), or the active run of W&B or trackio.

URLs and topics are passwords: give them as environment variables (`slack:$SLACK_URL`). A thread of
its own sends, with a timeout; whatever goes wrong there is logged once and stops nothing.
"""

import contextvars
import html
import json
import logging
import os
import queue
import re
import shlex
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

TIMEOUT = 10.0  # seconds for one request
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
    """Sends events of the watch to channels, from a thread of its own."""

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
        self._queue: queue.Queue[Payload | None] = queue.Queue(maxsize=MOST_QUEUED)
        self._thread: threading.Thread | None = None

    def send(self, event: Event) -> bool:
        """Queue an event and return at once; False if it was sent lately or too many were."""
        now = self.clock()
        if not self._is_due(event, now):
            return False

        try:
            self._queue.put_nowait(self.payload(event))
        except queue.Full:
            return False

        self._sent[_finding(event)] = now
        self._times.append(now)
        if self._thread is None:
            self._start()

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

    def _start(self) -> None:
        # trackio's active run belongs to the context of the training thread.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._work,),
            daemon=True,
        )
        self._thread.start()

    def close(self, timeout: float = TIMEOUT / 2) -> None:
        """Wait for what is queued, at most `timeout` seconds."""
        if self._thread is not None and self._thread.is_alive():
            with suppress(queue.Full):
                self._queue.put_nowait(None)

            self._thread.join(timeout)
            if self._thread.is_alive():
                log.warning(f"an alert was not sent within {timeout:g} s")

        self._thread = None

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

    def _work(self) -> None:
        while (payload := self._queue.get()) is not None:
            for channel in self.channels:
                try:
                    channel.send(payload)
                except Exception as error:
                    channel.report(error)


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
    """Where alerts go, as in "slack:$SLACK_URL"."""

    def __init__(self, text: str) -> None:
        self.kind, self.target = check_alert(text)
        self.failed = False
        if self.kind in WITH_ADDRESS:
            self.url()  # a mistake shows at the start, not when the run is dying

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
        subprocess.run(
            shlex.split(self.target),
            input=json.dumps(payload),
            text=True,
            timeout=TIMEOUT,
            check=True,
            capture_output=True,
        )

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
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            response.read(1000)


def _reason(error: Exception) -> str:
    if isinstance(error, LookupError):
        return str(error)

    name = type(error).__name__
    if isinstance(error, urllib.error.HTTPError):
        return f"{name} {error.code}"

    return name
