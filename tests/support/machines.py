"""Two machines on one: network namespaces joined by a cable of two virtual ends.

Processes of one reach those of the other only through the cable. The folders are shared, as on a
cluster. This takes root and Linux's `ip`.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

TESTS = str(Path(__file__).parents[1])
ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Machine:
    def __init__(self, number: int) -> None:
        self.name = f"mesotron{os.getpid()}-{number}"
        self.cable = f"cable{number}"
        self.address = ADDRESSES[number]
        self.started: list[subprocess.Popen] = []

    def start(self, command: Sequence[str], folder: Path, **variables: str) -> subprocess.Popen:
        """Start a command here; its stderr is kept."""
        shared = {
            "PYTHONPATH": os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), TESTS) if p),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.cable,
        }
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            cwd=folder,
            env=os.environ | shared | variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def kill(self) -> None:
        """As if its power were cut: no process of it runs any longer."""
        for process in self.started:
            if process.poll() is not None:
                continue

            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()

            process.communicate()


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Skips the test where this machine cannot be two."""
    machines = [Machine(0), Machine(1)]
    try:
        lay_cable(*machines)
    except (OSError, subprocess.CalledProcessError) as error:
        remove(machines)
        pytest.skip(f"two network namespaces need root and Linux's `ip`: {error}")

    try:
        yield machines
    finally:
        for machine in machines:
            machine.kill()
        remove(machines)


def lay_cable(first: Machine, second: Machine) -> None:
    for machine in (first, second):
        ip("netns", "add", machine.name)

    ends = [first.cable, "netns", first.name, "type", "veth"]
    ip("link", "add", *ends, "peer", "name", second.cable, "netns", second.name)
    for machine in (first, second):
        ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.cable)
        ip("-n", machine.name, "link", "set", "lo", "up")
        ip("-n", machine.name, "link", "set", machine.cable, "up")


def remove(machines: Sequence[Machine]) -> None:
    for machine in machines:
        with suppress(OSError, subprocess.CalledProcessError):  # it was never made
            ip("netns", "del", machine.name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
