"""The report in a real browser (chromium, headless). With MESOTRON_SCREENSHOTS set
(`make screenshots`) it also takes the documentation's screenshots."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from mesotron.report import read_runs, render_runs
from mesotron.report.tournament import render_tournament
from support.report_worlds import ATTACK, make_event, make_run, make_sample, make_tournament

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
GOLDEN = Path(__file__).parents[1] / "golden" / "runs"
ASSETS = Path(__file__).parents[2] / "docs" / "assets"
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium-driver)"
)
OPEN_ALL = "document.querySelectorAll('details').forEach((fold) => { fold.open = true; })"


class Browser:
    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""

        for flag in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
        ):
            options.add_argument(flag)

        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.web = webdriver.Chrome(options=options, service=Service(DRIVER))

    def open(self, page: Path, width: int = 1200, dark: bool = False, height: int = 900) -> None:
        self.web.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {
                "width": width,
                "height": height,
                "deviceScaleFactor": 1,
                "mobile": width < 600,
            },
        )

        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.web.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
        clear = {"source": "sessionStorage.clear()"}
        added = self.web.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", clear)
        self.web.get(page.as_uri())
        self.web.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str):
        return self.web.execute_script(script)

    def wait(self, condition: str):
        for _ in range(200):
            if found := self.run(f"return {condition}"):
                return found
            self.web.execute_async_script("setTimeout(arguments[0], 50)")

        raise AssertionError(condition)

    def keys(self, *pressed: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.web).send_keys(*pressed).perform()

    def drag(self, where: str, start: int, end: int) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        element = self.web.find_element("css selector", where)
        self.web.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        middle = element.rect["width"] / 2
        actions = ActionChains(self.web).move_to_element_with_offset(element, start - middle, 0)
        actions.click_and_hold().move_by_offset(end - start, 0).release().perform()

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.web.get_log("browser")]

    def requests(self) -> list[str]:
        messages = [json.loads(e["message"])["message"] for e in self.web.get_log("performance")]
        sent = []
        for m in messages:
            if m["method"] == "Network.requestWillBeSent":
                sent.append(m)

        return [message["params"]["request"]["url"] for message in sent]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    driver = Browser()
    yield driver
    driver.web.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A page by name; `arith` and `vote` are real runs."""
    root = tmp_path_factory.mktemp("pages")
    runs = {
        "both": ("arith", "vote"),
        "live": ("arith",),
        "attacked": ("attacked", "arith"),
    }

    @cache
    def write(name: str) -> Path:
        if name == "tournament":
            make_tournament(root / "tournament")
            text = render_tournament(root / "tournament")
        else:
            paths = [GOLDEN / run for run in runs.get(name, (name,))]
            if name == "attacked":
                rows = [
                    {
                        "step": k,
                        "reward": 0.1 * k,
                        ATTACK: 1.0,
                    }
                    for k in range(1, 9)
                ]

                samples = [make_sample(1, ATTACK)]
                events = [make_event(5, "warn", ATTACK)]
                changed = {
                    "rows": rows,
                    "samples": samples,
                    "events": events,
                }

                paths[0] = make_run(root / name, **changed).path

            text = render_runs(read_runs(paths), live=2 if name == "live" else None)

        (root / f"{name}.html").write_text(text, encoding="utf-8")
        return root / f"{name}.html"

    return write


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arith", "tournament"])
def test_every_chart_is_drawn_without_errors_or_requests(browser, page, name):
    browser.requests()
    browser.open(page(name), height=30_000)
    browser.run(OPEN_ALL)
    browser.run("window.drawn = (p) => p.querySelectorAll('.line, circle, .cross').length")
    lines = "[...document.querySelectorAll('.plot')].map(window.drawn)"
    browser.wait(f"{lines}.every(Boolean)")

    assert browser.run(f"return {lines}.length") > 2
    assert browser.errors() == []
    assert browser.requests() == [page(name).as_uri()]


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_wider_than_the_screen(browser, page, width):
    for name in ("both", "tournament"):
        browser.open(page(name), width, height=3000)
        browser.wait("document.querySelector('.plot > svg')?.clientWidth > 250")
        browser.run(OPEN_ALL)

        assert browser.run("return document.documentElement.scrollWidth") <= width


def test_model_output_is_shown_and_never_run(browser, page):
    browser.requests()
    browser.open(page("attacked"), height=30_000)
    browser.run(OPEN_ALL)

    browser.run(
        "document.querySelectorAll('main *').forEach((each) => {"
        "each.dispatchEvent(new Event('mouseover')); each.dispatchEvent(new Event('load'));"
        "})"
    )

    browser.wait("[...document.querySelectorAll('.plot')].every((p) => p.querySelector('.line'))")
    assert browser.run("return window.hacked") is None
    assert browser.run("return document.querySelectorAll('img, iframe, object').length") == 0
    assert browser.run("return document.querySelectorAll('.plot a').length") == 0

    shown = browser.run("return document.getElementById('completions').innerText")
    assert "</script><script>window.hacked=1</script>" in shown
    assert "⟨U+202E⟩esrever" in shown
    assert browser.errors() == []
    assert browser.requests() == [page("attacked").as_uri()]


@pytest.mark.slow
def test_markup_that_slipped_through_could_not_run(browser, page, tmp_path):
    slipped = (
        "<script>window.hacked=1</script><img src='http://127.0.0.1:9/x' onerror='window.hacked=2'>"
    )
    broken = tmp_path / "broken.html"
    broken.write_text(page("arith").read_text().replace("<footer>", f"{slipped}<footer>"))
    browser.open(broken)

    assert browser.run("return window.hacked") is None
    errors = browser.errors()
    assert any("script-src" in message for message in errors)
    assert any("img-src" in message or "default-src" in message for message in errors)


def test_the_keyboard_reads_a_chart(browser, page):
    from selenium.webdriver.common.keys import Keys

    browser.open(page("arith"))
    browser.run("document.querySelector('.plot').focus()")

    said = "document.getElementById('said').textContent"
    for key, text in ((Keys.HOME, "steps 1:"), (Keys.ARROW_RIGHT, "steps 2:"), (Keys.END, "40:")):
        browser.keys(key)
        browser.wait(f"{said}.includes('{text}')")

    assert browser.run(f"return {said}").startswith("Reward, ")
    assert "1.032" in browser.run("return document.querySelector('.plot .tip.on').innerText")


def test_runs_axis_zoom_and_theme(browser, page):
    browser.open(page("both"), height=2000)
    traces = "document.querySelectorAll('.plot')[0].querySelectorAll('path.line').length"
    browser.wait(f"{traces} === 4")  # two runs, each raw and smoothed
    browser.run("document.querySelector('[data-run=\"1\"]').click()")
    browser.wait(f"{traces} === 2")
    pressed = "return document.querySelector('[data-run=\"1\"]').getAttribute('aria-pressed')"

    assert browser.run(pressed) == "false"
    browser.run(
        "const axis = document.getElementById('axis'); axis.value = 'minutes';"
        "axis.dispatchEvent(new Event('change'))"
    )

    second = "document.querySelectorAll('.plot')[1].innerText"
    assert "minutes" in browser.run(f"return {second}")

    whole = browser.run(f"return {second}")
    browser.drag(".plot > svg", 200, 400)
    assert browser.run(f"return {second}") != whole  # all charts zoom together
    browser.run("document.getElementById('reset').click()")
    assert browser.run(f"return {second}") == whole

    color = "return getComputedStyle(document.body).backgroundColor"
    light = browser.run(color)
    switch = "document.getElementById('theme').click();"

    assert browser.run(switch + color) == light
    dark = browser.run(switch + color)
    assert dark != light

    system = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.web.execute_cdp_cmd("Emulation.setEmulatedMedia", system)
    assert browser.run(switch + color) == dark  # automatic again

    # WCAG: 4.5 to 1 for text, 3 to 1 for lines.
    for theme in ("light", "dark"):
        words, lines = browser.run(
            f"document.documentElement.dataset.theme = '{theme}';"
            + """
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
        return [words.flatMap((a) => ['page', 'card'].map((b) => contrast(a, b))),
                [0, 1, 2, 3, 4, 5, 6].map((k) => contrast(`c${k}`, 'card'))];
    """
        )

        assert min(words) >= 4.5, words
        assert min(lines) >= 2.9, lines


@pytest.mark.slow
def test_a_live_page_keeps_its_place(browser, page):
    browser.open(page("live"))
    browser.run(
        "window.scrollTo(0, 900); window.before = true;"
        "[...document.querySelectorAll('details')].at(-1).open = true"
    )

    look = (
        "window.before === undefined && document.querySelector('.plot > svg') && "
        "[window.scrollY, [...document.querySelectorAll('details')].at(-1).open]"
    )

    assert browser.wait(look) == [900, True]
    assert browser.errors() == []


@pytest.mark.skipif("MESOTRON_SCREENSHOTS" not in os.environ, reason="run by make screenshots")
@pytest.mark.parametrize(
    ("name", "shown", "width", "height", "dark", "part"),
    [
        ("report_wide", "arith", 1280, 1180, False, None),
        ("report_rescued", "rescued", 1280, 1425, False, None),
        ("report_dead", "vote", 1280, 1000, False, "watch"),
    ],
)
def test_screenshots(browser, page, name, shown, width, height, dark, part):  # noqa: PLR0913  # a table of pictures
    browser.open(page(shown), width, dark, height)
    if part:
        browser.run(f"document.getElementById('{part}').scrollIntoView()")

    browser.web.execute_async_script("setTimeout(arguments[0], 1500)")
    browser.web.save_screenshot(str(ASSETS / f"{name}.png"))
