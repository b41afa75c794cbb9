"""The report in a real browser: Debian's chromium, headless. Screenshots for the documentation are
taken where MESOTRON_SCREENSHOTS is set (`make screenshots`)."""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mesotron.report import read_runs, render_runs
from mesotron.report.tournament import render_tournament
from support.report_worlds import (
    ATTACK,
    make_event,
    make_run,
    make_sample,
    make_snake,
    make_tournament,
)

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
GOLDEN = Path(__file__).parents[1] / "golden" / "runs"
ASSETS = Path(__file__).parents[2] / "docs" / "assets"
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium-driver)"
)

Browser = Callable[..., "Driver"]


class Driver:
    """One browser window, and what the tests ask of it."""

    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--hide-scrollbars", "--force-color-profile=srgb"):  # fmt: skip
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.web = webdriver.Chrome(options=options, service=Service(DRIVER))

    def open(self, page: Path, width: int = 1200, dark: bool = False, height: int = 900) -> None:
        self.web.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600,
        })  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.web.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
        # A page remembers where one was in it; here each is opened for the first time.
        clear = {"source": "sessionStorage.clear()"}
        added = self.web.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", clear)
        self.web.get(page.as_uri())
        self.web.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)

    def run(self, script: str):
        return self.web.execute_script(script)

    def settle(self) -> None:
        """Wait for two frames: what was asked for is drawn."""
        self.web.execute_async_script(
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0)))"
        )

    def keys(self, *pressed: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.web).send_keys(*pressed).perform()
        self.settle()

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.web.get_log("browser")]

    def requests(self) -> list[str]:
        """Every address that was asked for since the last call."""
        found = []
        for entry in self.web.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.web.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of each kind; `arith` and `vote` are real runs."""
    root = tmp_path_factory.mktemp("pages")
    make_snake(root / "snake")
    make_tournament(root / "tournament")
    attacked = make_run(
        root / "attacked",
        samples=[make_sample(1, ATTACK)],
        events=[make_event(5, "warn", ATTACK)],
        rows=[{"step": k, "reward": 0.1 * k, ATTACK: 1.0} for k in range(1, 9)],
    )
    made = {
        "arith": render_runs(read_runs([GOLDEN / "arith"])),
        "vote": render_runs(read_runs([GOLDEN / "vote"])),
        "both": render_runs(read_runs([GOLDEN / "arith", GOLDEN / "vote"])),
        "live": render_runs(read_runs([GOLDEN / "arith"]), live=1),
        "snake": render_runs(read_runs([root / "snake"])),
        "tournament": render_tournament(root / "tournament"),
        "attacked": render_runs(read_runs([attacked.path])),
    }
    for name, text in made.items():
        (root / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: root / f"{name}.html" for name in made}


@pytest.mark.parametrize(
    "name",
    [
        "arith",
        "both",
        "tournament",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("vote", "snake")),
    ],
)
def test_every_chart_is_drawn_without_a_complaint_or_a_request(browser, pages, name):
    browser.requests()
    browser.open(pages[name], height=20_000)  # everything is in view
    browser.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    browser.settle()
    browser.settle()
    drawn = browser.run(
        "return [...document.querySelectorAll('.plot')].map("
        "(plot) => plot.querySelectorAll('svg path.line, svg path.dot, svg path.cross').length)"
    )
    assert len(drawn) > 2
    assert all(drawn), [k for k, count in enumerate(drawn) if not count]
    assert browser.errors() == []
    assert browser.requests() == [pages[name].as_uri()]


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_wider_than_the_screen(browser, pages, width):
    for name in ("both", "tournament"):
        browser.open(pages[name], width)
        browser.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run("return document.querySelector('.plot svg').clientWidth") > 250


def test_what_a_model_said_is_shown_and_never_run(browser, pages):
    browser.requests()
    browser.open(pages["attacked"], height=20_000)
    browser.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    browser.run("document.querySelectorAll('main *').forEach((each) => {"
                "each.dispatchEvent(new Event('mouseover')); each.dispatchEvent(new Event('load'));"
                "})")  # fmt: skip
    browser.settle()
    assert browser.run("return window.hacked") is None
    assert browser.run("return document.querySelectorAll('img, iframe, object').length") == 0
    shown = browser.run("return document.getElementById('what-it-wrote').innerText")
    assert "</script><script>window.hacked=1</script>" in shown
    assert "⟨U+202E⟩esrever" in shown
    marked = "return [...document.querySelectorAll('mark')].map((mark) => mark.textContent)"
    assert "<b>7</b>" in browser.run(marked)  # the answer that the format finds
    assert browser.errors() == []
    assert browser.requests() == [pages["attacked"].as_uri()]


def test_even_markup_that_slipped_through_could_not_run(browser, pages, tmp_path):
    """The second wall: the policy, tried with an escape that failed."""
    html = pages["arith"].read_text()
    slipped = (
        "<script>window.hacked=1</script><img src='http://127.0.0.1:9/x' onerror='window.hacked=2'>"
    )
    broken = tmp_path / "broken.html"
    broken.write_text(html.replace("<footer>", f"{slipped}<footer>"))
    browser.open(broken)
    browser.settle()
    assert browser.run("return window.hacked") is None
    refused = browser.errors()
    assert any("script-src" in message for message in refused)
    assert any("img-src" in message or "default-src" in message for message in refused)


def test_the_keyboard_reads_a_chart(browser, pages):
    from selenium.webdriver.common.keys import Keys

    browser.open(pages["arith"])
    browser.run("document.querySelector('.plot').focus()")
    browser.keys(Keys.HOME)
    said = "return document.getElementById('said').textContent"
    assert browser.run(said).startswith("Reward, steps 1: 0.1914 (")
    browser.keys(Keys.ARROW_RIGHT)
    assert "steps 2:" in browser.run(said)
    browser.keys(Keys.END)
    assert "steps 60:" in browser.run(said)
    others = browser.run(
        "return [...document.querySelectorAll('.readout')].filter("
        "(each) => each.textContent.startsWith('steps 60')).length"
    )
    assert others > 1  # one cursor for the charts in view
    browser.keys(Keys.ESCAPE)
    assert browser.run("return document.querySelector('.readout').textContent") == ""


def test_many_lines_are_read_in_a_list_beside_the_cursor(browser, pages):
    from selenium.webdriver.common.keys import Keys

    browser.open(pages["tournament"])
    browser.run("document.querySelector('.plot').focus()")
    browser.keys(Keys.END)
    rows = browser.run(
        "return [...document.querySelectorAll('.tip-row')].map((r) => r.textContent)"
    )
    assert len(rows) == 6  # two seeds of three contenders
    values = [float(row.split()[0]) for row in rows]
    assert values == sorted(values, reverse=True)
    assert "pion, rate 0.0004, seed 1" in browser.run(
        "return document.getElementById('said').textContent"
    )
    assert browser.errors() == []  # the policy has nothing against where it stands


def test_focus_goes_through_the_page_in_its_order(browser, pages):
    from selenium.webdriver.common.keys import Keys

    browser.open(pages["both"])
    seen = []
    for _ in range(28):
        browser.keys(Keys.TAB)
        seen.append(browser.run(
            "const e = document.activeElement; const r = e.getBoundingClientRect();"
            "return {word: e.id || e.className || e.textContent, top: r.top + scrollY,"
            "visible: getComputedStyle(e).outlineStyle !== 'none'}"
        ))  # fmt: skip
    words = [one["word"] for one in seen]
    assert words[:2] == ["skip", "theme"]
    assert words.index("axis") < words.index("smooth") < words.index("plot")
    assert all(one["visible"] for one in seen)  # the focus is to be seen
    plots = [one["top"] for one in seen if one["word"] == "plot"]
    assert plots == sorted(plots)


def test_a_hidden_run_another_axis_and_a_zoom_change_what_is_drawn(browser, pages):
    browser.open(pages["both"], height=3000)
    browser.settle()
    lines = "return document.querySelectorAll('.plot svg')[0].querySelectorAll('path.line').length"
    both = browser.run(lines)
    assert both == 4  # two runs, each faint and smooth
    browser.run("document.querySelector('[data-run=\"1\"]').click()")
    assert browser.run(lines) == both / 2
    pressed = "return document.querySelector('[data-run=\"1\"]').getAttribute('aria-pressed')"
    assert browser.run(pressed) == "false"
    name = "return document.querySelector('.plot .axis-name').textContent"
    assert browser.run(name) == "steps"
    browser.run("const axis = document.getElementById('axis'); axis.value = 'minutes';"
                "axis.dispatchEvent(new Event('change'))")  # fmt: skip
    assert browser.run(name) == "minutes"
    browser.run("""
        const svg = document.querySelector('.plot svg'), box = svg.getBoundingClientRect();
        const at = (share, type) => svg.dispatchEvent(new PointerEvent(type, {
          clientX: box.left + share * box.width, clientY: box.top + 90, pointerType: 'mouse',
          button: 0, bubbles: true }));
        at(0.3, 'pointerdown'); at(0.6, 'pointermove'); at(0.6, 'pointerup');
    """)
    assert browser.run("return document.getElementById('reset').hidden") is False
    browser.run("document.getElementById('reset').click()")
    assert browser.run("return document.getElementById('reset').hidden") is True


def test_light_and_dark_follow_the_system_and_the_switch(browser, pages):
    colour = "return getComputedStyle(document.body).backgroundColor"
    browser.open(pages["arith"])
    light = browser.run(colour)
    browser.open(pages["arith"], dark=True)
    dark = browser.run(colour)
    assert light != dark
    switch = "document.getElementById('theme').click(); "
    assert browser.run(switch + colour) == light  # auto to light
    assert browser.run(switch + colour) == dark


@pytest.mark.parametrize("dark", [False, True])
def test_words_can_be_read_on_their_ground(browser, pages, dark):
    """WCAG's contrast of text, 4.5 to 1, and of lines, 3 to 1."""
    browser.open(pages["arith"], dark=dark)
    found = browser.run("""
        const light = (name) => {
          const probe = document.body.appendChild(document.createElement('i'));
          probe.style.color = `var(--${name})`;
          const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
          probe.remove();
          const [r, g, b] = parts.map((x) => x / 255).map(
            (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const contrast = (a, b) => {
          const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
          return (x + 0.05) / (y + 0.05);
        };
        const words = ['ink', 'soft', 'accent', 'good', 'fair', 'bad'];
        const lines = [0, 1, 2, 3, 4, 5, 6].map((k) => `c${k}`);
        return [Object.fromEntries(words.flatMap((a) => ['page', 'card'].map(
                  (b) => [`${a} on ${b}`, contrast(a, b)]))),
                Object.fromEntries(lines.map((a) => [a, contrast(a, 'card')]))];
    """)
    words, lines = found
    assert min(words.values()) >= 4.5, words
    assert min(lines.values()) >= 2.9, lines


def test_a_live_page_comes_back_to_its_place(browser, pages):
    browser.open(pages["live"])
    browser.run("window.scrollTo(0, 900); window.before = true;"
                "document.querySelectorAll('details')[0].open = true")  # fmt: skip
    # It loads itself after a second, and then again: one look at all of it, when its script has run
    # (the browser scrolls by itself before that).
    look = ("return window.before === undefined && document.readyState === 'complete' && "
            "[window.scrollY, document.querySelectorAll('details')[0].open]")  # fmt: skip
    found = None
    for _ in range(60):
        browser.web.execute_async_script("setTimeout(arguments[0], 100)")
        if found := browser.run(look):
            break
    assert found == [900, True]
    assert browser.errors() == []


def test_without_a_script_the_numbers_are_there(browser, pages):
    browser.web.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.web.get(pages["arith"].as_uri())
        source = browser.web.page_source
    finally:
        browser.web.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "Without a script no chart is drawn" in source
    assert "Reward in numbers" in source
    assert '<svg aria-hidden="true" height' not in source


@pytest.mark.skipif("MESOTRON_SCREENSHOTS" not in os.environ, reason="asked for: make screenshots")
@pytest.mark.parametrize(
    ("name", "page", "width", "height", "dark", "part"),
    [
        ("report_wide", "arith", 1280, 1180, False, None),
        ("report_phone", "arith", 390, 1100, True, None),
        ("report_dead", "vote", 1280, 1000, False, "the-watch"),
        ("report_runs", "both", 1280, 1000, True, "is-it-learning"),
        ("report_written", "arith", 1280, 820, False, "what-it-wrote"),
        ("report_spectra", "arith", 1280, 560, False, "what-does-the-filter-do"),
    ],
)
def test_screenshots_for_the_documentation(browser, pages, name, page, width, height, dark, part):
    browser.open(pages[page], width, dark, height)
    if part:
        browser.run(f"document.getElementById('{part}').scrollIntoView()")
    for _ in range(3):
        browser.settle()
    picture, old = browser.web.get_screenshot_as_png(), ASSETS / f"{name}.png"
    if not old.is_file() or looks_different(picture, old.read_bytes()):
        old.write_bytes(picture)


def looks_different(new: bytes, old: bytes) -> bool:
    """Whether more than one pixel of 10,000 has changed; edges of round corners vary by fewer."""
    images = [np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in (new, old)]
    if images[0].shape != images[1].shape:
        return True
    return bool((images[0] != images[1]).any(axis=2).mean() > 1e-4)
