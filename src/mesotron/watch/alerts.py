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
from mesotron.watch.events import Event

TIMEOUT = 10.0  # seconds for one request
QUIET = 600.0  # seconds until the same finding is sent again
MOST_PER_HOUR = 20
SCHEMA = "mesotron.alert/1"
COLORS = {"stop": 0xD62728, "warn": 0xFFBF00, "clear": 0x2CA02C}
LEVELS = {"stop": "ERROR", "warn": "WARN", "clear": "INFO"}
PRIORITIES = {"stop": "5", "warn": "4", "clear": "3"}
log = logging.getLogger("mesotron.watch")


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
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=100)
        self._thread: threading.Thread | None = None

    def send(self, event: Event) -> bool:
        """Queue an event and return at once; False if it was sent lately or too many were."""
        now = self.clock()
        self._times = [at for at in self._times if now - at < 3600]
        finding = f"{event.detector} {event.severity}"
        recent = now - self._sent.get(finding, -QUIET) < QUIET
        known = f"{event.detector} warn" in self._sent or f"{event.detector} stop" in self._sent
        if recent or len(self._times) >= MOST_PER_HOUR or (event.severity == "clear" and not known):
            return False

        try:
            self._queue.put_nowait(self.payload(event))
        except queue.Full:
            return False

        self._sent[finding] = now
        self._times.append(now)

        if self._thread is None:
            # trackio's active run belongs to the context of the training thread.
            target = contextvars.copy_context().run
            self._thread = threading.Thread(
                target=target,
                args=(self._work,),
                daemon=True,
            )
            self._thread.start()

        return True

    def close(self, timeout: float = TIMEOUT / 2) -> None:
        """Wait for what is queued, at most `timeout` seconds."""
        if self._thread is not None and self._thread.is_alive():
            with suppress(queue.Full):
                self._queue.put_nowait(None)

            self._thread.join(timeout)
            if self._thread.is_alive():
                log.warning(f"an alert was not sent within {timeout:g} s")

        self._thread = None

    def payload(self, event: Event) -> dict[str, Any]:
        """An event as the JSON that webhooks and commands get."""
        name = event.detector.replace("_", " ")
        state = {
            "stop": "is dead",
            "warn": "shows signs of trouble",
            "clear": "has recovered",
        }

        lost = self.price if event.severity == "stop" else None
        link = self.link if "://" in self.link or Path(self.link).is_file() else ""
        evidence = [item.text() for item in event.evidence]

        lines = [
            f"{event.diagnosis[:1].upper()}{event.diagnosis[1:]}.",
            f"Step {event.step}; began at step {event.began}." if event.began is not None else "",
            f"Evidence: {', '.join(evidence)}." if evidence else "",
            f"Each further hour costs ${lost:.2f}." if lost else "",
            f"What to do: {event.remedy}." if event.severity != "clear" else "",
            link,
        ]
        return {
            "schema": SCHEMA,
            "run": self.run,
            "title": f"{self.run or 'The run'} {state[event.severity]}: {name}",
            "text": "\n".join(line for line in lines if line),
            **{key: value for key, value in asdict(event).items() if key != "confidence"},
            "dollars_per_hour": lost,
            "link": link or None,
        }

    def _work(self) -> None:
        while (payload := self._queue.get()) is not None:
            for channel in self.channels:
                try:
                    channel.send(payload)
                except Exception as error:
                    channel.report(error)


class Channel:
    def __init__(self, text: str) -> None:
        self.kind, self.target = check_alert(text)
        self.failed = False

        if self.kind in ("webhook", "slack", "discord", "ntfy"):
            self.url()  # a mistake shows at the start, not when the run is dying

    def url(self) -> str:
        """The address, from the environment; it must never be logged."""
        target = self.target
        variable = re.fullmatch(r"\$\{?(\w+)\}?", self.target)
        if variable and not (target := os.environ.get(variable[1], "")):
            raise ValueError(f"alert {self.kind}:${variable[1]}: export {variable[1]} first")
        if self.kind == "ntfy" and re.fullmatch(r"[-\w]{1,64}", target, re.ASCII):
            return f"https://ntfy.sh/{target}"
        if not re.match(r"https?://[\w\[]", target, re.IGNORECASE):
            raise ValueError(f"alert {self.kind}: the address in {self.target} is no http(s) URL")

        return target

    def send(self, payload: dict[str, Any]) -> None:
        if self.kind == "command":
            text = json.dumps(payload)
            subprocess.run(
                shlex.split(self.target),
                input=text,
                text=True,
                timeout=TIMEOUT,
                check=True,
                capture_output=True,
            )
        elif self.kind in ("wandb", "trackio"):
            module: Any = sys.modules.get(self.kind)  # the run is active only where it was imported
            if module is None or (self.kind == "wandb" and module.run is None):
                raise LookupError(f"no run of {self.kind} is active in this process")

            title = payload["title"][:63]
            text = payload["text"]

            level = LEVELS[payload["severity"]]
            if self.kind == "trackio":
                module.alert(title, text, level=module.AlertLevel(level.lower()))
            else:
                module.run.alert(title, text, level=level)
        elif self.kind == "ntfy":
            title = re.sub(r"[^ -~]", "?", payload["title"])[:200]  # a header is ASCII
            priority = PRIORITIES[payload["severity"]]
            headers = {
                "Title": title,
                "Tags": "rotating_light",
                "Priority": priority,
            }

            self._post(payload["text"].encode(), headers)
        else:
            body = payload
            if self.kind == "slack":
                title, text = (html.escape(payload[k], quote=False) for k in ("title", "text"))
                shown = {"type": "mrkdwn", "text": f"*{title}*\n{text}"[:2900]}
                body = {"text": title[:300], "blocks": [{"type": "section", "text": shown}]}
            elif self.kind == "discord":
                embed = {
                    "title": payload["title"][:250],
                    "description": payload["text"][:4000],
                    "color": COLORS[payload["severity"]],
                }
                body = {"embeds": [embed], "allowed_mentions": {"parse": []}}

            self._post(json.dumps(body).encode(), {"Content-Type": "application/json"})

    def report(self, error: Exception) -> None:
        """Log the first failure; its text may contain the address, so it is left out."""
        if not self.failed:
            code = f" {error.code}" if isinstance(error, urllib.error.HTTPError) else ""
            why = str(error) if isinstance(error, LookupError) else f"{type(error).__name__}{code}"
            log.warning(f"an alert to {self.kind} was not sent: {why}")

        self.failed = True

    def _post(self, data: bytes, headers: dict[str, str]) -> None:
        headers = {"User-Agent": "mesotron"} | headers
        request = urllib.request.Request(self.url(), data, headers, method="POST")
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            response.read(1000)
