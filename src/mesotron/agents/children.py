"""The training processes of a server: started under a limit, stopped, resumed.

A child is `mesotron train` in a session of its own, so it goes on when the server ends, up to its
own limits. Its log and a note of its process lie in `.mcp/` of the folder, where the next server
finds them.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesotron.agents.folder import NAME, Folder
from mesotron.config import TrainConfig
from mesotron.config.base import flags_of, spell, suggest
from mesotron.config.flags import find_setting
from mesotron.recipes import RECIPES
from mesotron.runs import RunFolder, new_run_path
from mesotron.runs.files import read_json, write_json
from mesotron.runs.folder import is_locked
from mesotron.runs.links import open_own
from mesotron.runs.trust import names_code

COMMAND = (sys.executable, "-m", "mesotron")
WAIT = 20.0  # seconds for a start to load, or a stop to save: clients give up on slow answers
POLL = 0.2
LAST_LINES = 20
LOG_TAIL = 64_000  # bytes
# Settings with parameters of their own, or which reach out of the folder.
OURS = {"recipe", "out", "resume", "trust", "budget", "price", "gpu", "time_limit"}
REACHING = {"report_to", "watch.alerts"}


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """What a session may spend."""

    budget: float | None = None
    price: float | None = None
    gpu: str | None = None
    time_limit: str | None = None

    @property
    def is_given(self) -> bool:
        return self.budget is not None or self.time_limit is not None

    def flags(self) -> list[str]:
        words = []
        for name, value in vars(self).items():
            if value is not None:
                words.append(f"--{name.replace('_', '-')}={value}")

        return words


class Children:
    """Processes that train runs of a folder.

    Args:
        folder: where they lie.
        trust: settings may name code, addresses and files elsewhere.
        at_once: how many may train at the same time.
        command: what starts `mesotron`.
    """

    def __init__(
        self,
        folder: Folder,
        trust: bool = False,
        at_once: int = 1,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.folder = folder
        self.trust = trust
        self.at_once = at_once
        self.command = command
        self._started: dict[str, subprocess.Popen[bytes]] = {}  # by this server
        self._starting = threading.Lock()  # tools run in threads

    # What a client asks for

    def start(
        self, recipe: str, name: str | None, settings: dict[str, Any], limits: SessionLimits
    ) -> dict[str, Any]:
        if not limits.is_given:
            raise ValueError(
                "a start needs a limit: give budget (dollars, with price or gpu) or time_limit, "
                "such as 30m"
            )
        if recipe not in RECIPES:
            raise ValueError(f"{recipe!r:.80} is no recipe{suggest(recipe, RECIPES)}")

        words = []
        for key, value in settings.items():
            words += self._flag(key, value)

        name = name or new_run_path(recipe, self.folder.root).name
        path = self.folder.new_run(name)
        self._launch(name, ["train", recipe, *words, *limits.flags(), f"--out={name}"])

        return self._wait_for_start(name, path)

    def resume(self, name: str, steps: int | None, limits: SessionLimits) -> dict[str, Any]:
        path = self.folder.run(name)
        name = path.name
        if path.parent != self.folder.root or not NAME.fullmatch(name):
            raise ValueError(f"{name:.80} lies in another run: resume that one")

        config = RunFolder(path).config
        if not limits.is_given and config.get("budget") is None:
            raise ValueError(
                f"{name} has no budget of its own: give budget (dollars, with price or gpu) or "
                "time_limit, such as 30m"
            )
        if self.state(name) == "running":
            raise ValueError(f"{name} is running: there is nothing to resume")

        words = ["train", f"--resume={name}", *limits.flags()]
        if steps is not None:
            words.append(f"--steps={steps}")

        self._launch(name, words)

        return self._wait_for_start(name, path)

    def stop(self, name: str, now: bool = False) -> dict[str, Any]:
        name = self.folder.inside(name).name
        pid = self.pid(name)
        if pid is None:
            if self.state(name) == "running":
                raise ValueError(f"{name} was not started by a server: stop it where it runs")
            raise ValueError(f"{name} is not running")

        if now:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)

        end = time.monotonic() + WAIT
        while self.pid(name) is not None and time.monotonic() < end:
            time.sleep(POLL)

        state = self.state(name)
        if self.pid(name) is not None:
            state = "stopping"

        return {"run": name, "state": state, **self._untrusted_log(name)}

    # How they stand

    def state(self, name: str) -> str:
        """Starting, running, finished, stopped (it can be resumed) or failed."""
        path = self.folder.root / name
        pid = self.pid(name)
        if pid is not None:
            return "running" if (path / "config.json").is_file() else "starting"
        if is_locked(path / "lock"):
            return "running"
        if (path / "result.json").is_file():
            return "finished"

        return "failed" if self.exit_code(name) else "stopped"

    def pid(self, name: str) -> int | None:
        """The process that trains a run, if a server started it and it lives."""
        child = self._started.get(name)
        if child is not None:
            return child.pid if child.poll() is None else None

        with suppress(ValueError, OSError, KeyError, TypeError):  # it may be damaged
            note = read_json(self.folder.own(f"{name}.json"))
            pid = int(note["pid"])
            if note["began"] and begun_at(pid) == note["began"]:
                return pid

        return None

    def exit_code(self, name: str) -> int | None:
        """How its process ended by itself; None if it was stopped, or by an earlier server."""
        child = self._started.get(name)
        if child is None or child.poll() in (-signal.SIGTERM, -signal.SIGKILL, 130):
            return None

        return child.poll()

    def last_lines(self, name: str) -> list[str]:
        """The end of a run's log."""
        file = self.folder.own(f"{name}.log")
        if not file.is_file():
            return []

        with open_own(file, "rb") as data:
            data.seek(max(file.stat().st_size - LOG_TAIL, 0))
            text = data.read(LOG_TAIL).decode("utf-8", errors="replace")

        return text.splitlines()[-LAST_LINES:]

    # Processes

    def _launch(self, name: str, words: list[str]) -> None:
        with self._starting:
            self._check_room()
            with open_own(self.folder.own(f"{name}.log"), "ab") as log:
                child = subprocess.Popen(
                    [*self.command, *words],
                    cwd=self.folder.root,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

            self._started[name] = child
            note = {"pid": child.pid, "began": begun_at(child.pid), "command": words}
            write_json(self.folder.own(f"{name}.json"), note)

    def _check_room(self) -> None:
        busy = []
        for note in self.folder.own("").glob("*.json"):
            if self.pid(note.stem) is not None:
                busy.append(note.stem)

        if len(busy) >= self.at_once:
            raise ValueError(
                f"{', '.join(busy)} is training, and this server allows {self.at_once} at once: "
                "stop it, or start the server with --at-once"
            )

    def _wait_for_start(self, name: str, path: Path) -> dict[str, Any]:
        """Wait until the run is loaded, or has failed; a slow start is left to itself."""
        child = self._started[name]
        end = time.monotonic() + WAIT
        while child.poll() is None and time.monotonic() < end:
            if is_locked(path / "lock"):
                break
            time.sleep(POLL)

        if child.poll() and not (path / "config.json").is_file():
            self._forget(name, path)
        if child.poll():
            raise ValueError(self._why(name))

        return {"run": name, "state": self.state(name), **self._untrusted_log(name)}

    def _forget(self, name: str, path: Path) -> None:
        """Remove what a start that failed has left, so that its name is free."""
        self.folder.own(f"{name}.json").unlink(missing_ok=True)
        if path.is_dir() and not any((path / "checkpoints").glob("*")):
            shutil.rmtree(path)

    def _why(self, name: str) -> str:
        """The sentence with which the command ended."""
        for line in reversed(self.last_lines(name)):
            if line.startswith("mesotron: "):
                return line.removeprefix("mesotron: ")

        code = self._started[name].returncode
        return f"{name} ended with exit code {code}: read_evidence shows its log"

    def _untrusted_log(self, name: str) -> dict[str, Any]:
        return {"untrusted": {"log": self.last_lines(name)}}

    # Settings

    def _flag(self, key: str, value: Any) -> list[str]:
        """A setting as words of a command line, if a client may give it."""
        setting = find_setting(TrainConfig, key)
        if setting is None:
            names = [flag.removeprefix("--") for flag in flags_of(TrainConfig)]
            raise ValueError(f"{key!r:.80} is no setting of mesotron train{suggest(key, names)}")
        if setting.path in OURS:
            raise ValueError(f"{setting.path} is no setting here: it is a parameter, or fixed")

        if isinstance(value, bool):
            return [spell(setting.flag, value)]

        if not isinstance(value, list):
            self._check_text(setting, str(value))
            return [f"{setting.flag}={value}"]

        texts = [str(one) for one in value]
        for text in texts:
            self._check_text(setting, text)

        return [setting.flag, *texts]

    def _check_text(self, setting: Any, text: str) -> None:
        if text.startswith("--"):
            raise ValueError(f"{setting.flag} {text:.80} looks like a flag: give a value")
        if self.trust:
            return

        is_code = bool(setting.field.metadata.get("is_code"))
        if setting.path in REACHING or (is_code and names_code(text)) or "://" in text:
            raise ValueError(
                f"{setting.flag} {text:.80} names code or an address: only a server with --trust "
                "starts that"
            )

        for part in re.split("[=:,]", text):  # such as the file of FILE:SUBSET
            plain = part.lstrip(" \t\"'([{")  # of JSON, which TRL's options are read as
            self.folder.inside(os.path.expanduser(plain))


def begun_at(pid: int) -> str | None:
    """When a living process began, so that a later one of the same number is not taken for it;
    None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None

    is_dead = fields[0] in ("Z", "X")
    return None if is_dead else fields[19]
