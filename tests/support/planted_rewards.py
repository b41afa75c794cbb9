"""Rewards for tests of `mesotron reward check`: ten with a planted exploit, one that is sound."""

import re

from mesotron.rlvr.answers.formats import FORMATS


def _boxed(text):
    return FORMATS["boxed"].extract(text)


def exact(completions, golds, **_):
    return [float(_boxed(text) == gold) for text, gold in zip(completions, golds)]


def empty_earns(completions, golds, **_):
    return [float(not text or _boxed(text) == gold) for text, gold in zip(completions, golds)]


def copy_earns(completions, golds, prompts, **_):
    rows = zip(completions, golds, (prompt[-1]["content"] for prompt in prompts))
    return [float(prompt in text or _boxed(text) == gold) for text, gold, prompt in rows]


def last_number(completions, golds, **_):
    found = [re.findall(r"\d+", text) for text in completions]
    return [float(numbers[-1:] == [gold]) for numbers, gold in zip(found, golds)]


def length_earns(completions, golds, **_):
    return [score + len(text) / 5000 for score, text in zip(exact(completions, golds), completions)]


def numbers_only(completions, golds, **_):
    right = [_boxed(text) == gold for text, gold in zip(completions, golds)]
    return [float(ok) if gold.isdigit() else None for ok, gold in zip(right, golds)]


def constant(completions, **_):
    return [1.0] * len(completions)


def ascii_only(completions, golds, **_):
    return [
        float(_boxed(text.encode("ascii").decode()) == g) for text, g in zip(completions, golds)
    ]


def slow_pattern(completions, golds, **_):
    pattern = re.compile(r"(?:[^\W\d]+)+\d?$")
    return [
        score * (not pattern.match(t)) for score, t in zip(exact(completions, golds), completions)
    ]


def format_first(completions, golds, **_):
    return [
        2.0 * bool(_boxed(t)) + score for score, t in zip(exact(completions, golds), completions)
    ]


def any_of_a_list(completions, golds, **_):
    boxes = [re.findall(r"\\boxed\{([^}]*)\}", text) for text in completions]
    return [float(gold in found) for found, gold in zip(boxes, golds)]


def uneven(completions, solution, **_):
    """Rows with longer golds pay more, in every spelling."""
    pairs = zip(completions, solution, strict=True)
    return [float(len(gold)) if gold in text else 0.0 for text, gold in pairs]
