"""One HTML file that needs nothing else: style, script and data inside, and no way out.

The policy in its head forbids every request and every script but the one whose hash it names, so
even markup that slipped through could neither run nor tell anybody.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from mesotron import __version__
from mesotron.report.charts import Chart
from mesotron.report.markup import Html, el, embed
from mesotron.report.sections import anchor, chart_frame, section, swatch

SCRIPTS = ("chart.js", "page.js")
# Lines over one another are drawn smooth, with the real ones faint behind them; a slider says so.
SMOOTH = 0.7
LONG = 40  # points; shorter curves are not noisy enough to be smoothed


@dataclass
class Draft:
    """A page while it is put together.

    Args:
        title: of the page.
        kind: what it is, above the title.
        sentences: what happened.
        runs: the x axes and marks of each run, for the script.
        names: of the runs whose lines can be switched off.
    """

    title: str
    kind: str
    sentences: Sequence[str]
    runs: list[dict[str, Any]] = field(default_factory=list)
    names: Sequence[str] = ()
    charts: list[Chart] = field(default_factory=list)
    parts: list[tuple[str, Html]] = field(default_factory=list)

    def add(self, title: str, *children: str | None) -> None:
        """A part under a heading; nothing if it would be empty."""
        if any(child is not None for child in children):
            self.parts.append((title, section(title, *children)))

    def frames(self, charts: Sequence[Chart]) -> Html:
        """The frames of charts, which the script will draw."""
        start = len(self.charts)
        self.charts += charts
        shared = len(self.names) > 1
        return el(
            "div",
            *(
                chart_frame(chart, start + k, shared and chart.x_name is None)
                for k, chart in enumerate(charts)
            ),
            class_="charts",
        )

    def render(self, top: Html, live: float | None = None) -> str:
        """The whole page.

        Args:
            top: what stands between the sentences and the parts.
            live: seconds after which the page loads itself again; None never.
        """
        longest = max((len(run["x"]["main"]["steps"]) for run in self.runs), default=0)
        smooth = SMOOTH if len(self.runs) > 1 and longest >= LONG else 0.0
        charts = [chart.record() for chart in self.charts]
        data = {"runs": self.runs, "smooth": smooth, "charts": charts}
        body = [
            el("a", "Skip to the report", href="#main", class_="skip"),
            self._header(top, live),
            self._nav(),
            self._bar(),
            el("main", *(part for _, part in self.parts), id="main"),
            el("footer", f"Made by mesotron {__version__}. This page holds all it needs."),
            el("div", id="said", class_="unseen", aria_live="polite"),
            Html(f'<script type="application/json" id="data">{embed(data)}</script>'),
            Html(f"<script>{script()}</script>"),
        ]
        html = el("html", self._head(live), el("body", *body, data_live=live), lang="en")
        return f"<!doctype html>\n{html}\n"

    def _head(self, live: float | None) -> Html:
        again = el("meta", http_equiv="refresh", content=f"{live:g}") if live else None
        return el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", http_equiv="Content-Security-Policy", content=policy()),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("meta", name="color-scheme", content="light dark"),
            el("title", f"{self.title} – mesotron report"),
            Html(f"<style>{style()}</style>"),
            el("noscript", again) if again else None,
        )

    def _header(self, top: Html, live: float | None) -> Html:
        badge = el("span", f"live, every {live:g} s", class_="live") if live else None
        theme = el("button", "Theme: auto", id="theme", type="button", hidden=True)
        return el(
            "header",
            el("p", el("span", self.kind), badge, theme, class_="brand"),
            el("h1", self.title),
            el("p", " ".join(self.sentences), class_="lead"),
            top,
            el("noscript", el("p", "Without a script no chart is drawn; “numbers” under each of "
                              "them opens the same as a table.")),
        )  # fmt: skip

    def _nav(self) -> Html:
        links = [el("li", el("a", title, href=f"#{anchor(title)}")) for title, _ in self.parts]
        return el("nav", el("ul", *links), aria_label="Parts of this report")

    def _bar(self) -> Html | None:
        if not any(chart.x_name is None for chart in self.charts):
            return None
        chips = [
            el("button", swatch(k), name, type="button", data_run=str(k), aria_pressed="true")
            for k, name in enumerate(self.names)
        ]
        several = len(chips) > 1
        return el(
            "div",
            el("div", *chips, class_="chips", role="group", aria_label="Runs") if several else None,
            el("label", "over", el("select", id="axis")),
            el("label", "smooth",
               el("input", type="range", id="smooth", min="0", max="0.95", step="0.05", value="0")),
            el("button", "Whole range", id="reset", type="button", hidden=True),
            id="bar", class_="bar", role="group", aria_label="How charts are drawn", hidden=True,
        )  # fmt: skip


@cache
def script() -> str:
    """The page's script: drawing first, then what uses it."""
    return "\n".join(asset(name) for name in SCRIPTS)


@cache
def style() -> str:
    """The page's style."""
    return asset("page.css")


def asset(name: str) -> str:
    """A file that is shipped beside this one."""
    return (files("mesotron.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def policy() -> str:
    """No request of any kind, no form, no base; this one script and this one style."""
    return (
        f"default-src 'none'; script-src {fingerprint(script())}; "
        f"style-src {fingerprint(style())}; base-uri 'none'; form-action 'none'"
    )


def fingerprint(text: str) -> str:
    """The hash by which a policy names an inline script or style.

    Example:
        >>> fingerprint("")
        "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
