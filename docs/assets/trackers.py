"""Takes the pictures of docs/trackers.md in Chromium: python docs/assets/trackers.py FOLDER

FOLDER is where this was run, with 127.0.0.1 alone as a network:

    export TRACKIO_DIR=$PWD/trackio
    mesotron train arith_collapse --steps 36 --trl project=arith --report-to trackio tensorboard \\
        --out runs/collapse
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

HERE = Path(__file__).resolve().parent
SIZE = (1200, 760)
WAIT = 60.0  # seconds for a server to answer
DRAW = 12.0  # seconds for a page to be drawn


@contextmanager
def serving(command: list[str], port: int, **variables: str) -> Iterator[str]:
    """The address of a server that answers."""
    server = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            try:
                urlopen(address, timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)

        yield address
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def open_browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.add_argument(f"--window-size={SIZE[0]},{SIZE[1]}")
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def picture(browser: webdriver.Chrome, address: str, file: Path) -> str:
    """Save a page as a picture; returns its text."""
    browser.get(address)
    time.sleep(DRAW)
    browser.save_screenshot(str(file))
    return browser.find_element("tag name", "body").text


def main(folder: Path) -> None:
    (events,) = {file.parent for file in folder.rglob("events.out.tfevents.*")}
    browser = open_browser()
    port = free_port()
    trackio = [str(Path(sys.executable).with_name("trackio")), "show", "--project", "arith"]
    store = {"TRACKIO_DIR": str(folder / "trackio"), "GRADIO_SERVER_PORT": str(port)}
    with serving(trackio, port, **store) as address:
        for page in ("reports", "traces"):
            text = picture(browser, f"{address}/{page}?project=arith", HERE / f"trackio_{page}.png")
            print(f"trackio {page}: {text[:600]!r}")

    port = free_port()
    os.chdir(events)
    board = [sys.executable, "-m", "tensorboard.main", "--logdir", ".", "--port", str(port)]
    with serving(board, port) as address:
        page = f"{address}/#text&tagFilter=watch"
        text = picture(browser, page, HERE / "tensorboard_text.png")
        print(f"tensorboard: {text[:600]!r}")

    browser.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
