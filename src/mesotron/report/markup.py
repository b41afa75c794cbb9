r"""HTML that cannot hold what it was not given: every word is escaped unless it is an `Html`.

A model can say anything: `</script>`, an event handler, a character that turns the line around.
All of it is shown and none of it is obeyed: markup is escaped, and characters that nobody sees
(controls, text direction, line separators, lone surrogates) are spelled out as <U+202E>.
"""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any

# Controls, formats (text direction, zero width), halves of a pair, private, line and paragraph
# separators: nobody sees them, and some of them change what is seen.
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
VOID = {"meta", "br", "rect", "line", "circle", "path", "input"}


class Html(str):
    """Text that is markup already, made by `el` from escaped parts."""


def el(tag: str, /, *children: str | None, **attributes: str | int | float | bool | None) -> Html:
    """One element.

    Args:
        tag: its name.
        *children: `Html` is kept, any other text is escaped, None is left out.
        **attributes: `class_` is class, `aria_label` is aria-label; True is a bare attribute, None
            and False leave it out.

    Example:
        >>> el("p", "a < b", el("b", "!"), class_="note")
        '<p class="note">a &lt; b<b>!</b></p>'
    """
    words = [tag, *(_attribute(key, value) for key, value in attributes.items())]
    start = f"<{' '.join(word for word in words if word)}>"
    if tag in VOID:
        return Html(start if tag in ("meta", "br", "input") else start[:-1] + "/>")
    return Html(f"{start}{join(*children)}</{tag}>")


def join(*children: str | None) -> Html:
    """Parts one after the other, each escaped unless it is `Html`."""
    return Html("".join(c if isinstance(c, Html) else escape(c) for c in children if c is not None))


def escape(text: str) -> Html:
    """Any text as the page shows it, in an element or in a quoted attribute.

    Example:
        >>> escape('<img src=x onerror="alert(1)">\u202e')
        '&lt;img src=x onerror=&quot;alert(1)&quot;&gt;⟨U+202E⟩'
    """
    shown = visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Html(shown.replace('"', "&quot;").replace("'", "&#39;"))


def visible(text: str) -> str:
    r"""Text with the characters that nobody sees spelled out; line breaks and tabs stay.

    Example:
        >>> visible("a\x1b[2Jb\u2028c")
        'a⟨U+001B⟩[2Jb⟨U+2028⟩c'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        f"⟨U+{ord(c):04X}⟩" if unicodedata.category(c) in UNSEEN and c not in "\n\t" else c
        for c in text
    )


def embed(value: Any) -> str:
    r"""JSON that a script element can hold: no tag ends in it, no number is NaN, all is ASCII.

    Example:
        >>> embed({"said": "</script>", "x": float("nan"), "y": 0.123456})
        '{"said":"\\u003c/script\\u003e","x":null,"y":0.1235}'
    """
    text = json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {visible(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return shorten(value)
    return visible(value) if isinstance(value, str) else value


def shorten(value: float) -> float | int | None:
    """A number with four digits, as many as a plot shows; None if it is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def _attribute(key: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return name if value is True else f'{name}="{escape(str(value))}"'
