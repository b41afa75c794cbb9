"""Rewards for tests of `mesotron check`: ten with a planted exploit, one that is sound."""

import re

from mesotron.answers.formats import FORMATS


def _boxed(text):
    return FORMATS["boxed"].extract(text)


def exact(completions, golds, **_):
    return [float(_boxed(text) == gold) for text, gold in zip(completions, golds)]


def empty_earns(completions, golds, **_):
    return [float(not text or _boxed(text) == gold) for text, gold in zip(completions, golds)]


def copy_earns(completions, golds, prompts, **_):
    rows = zip(completions, exact(completions, golds), prompts)
    return [float(prompt[-1]["content"] in text) or score for text, score, prompt in rows]


def last_number(completions, golds, **_):
    found = [re.findall(r"\d+", text) for text in completions]
    return [float(numbers[-1:] == [gold]) for numbers, gold in zip(found, golds)]


def length_earns(completions, golds, **_):
    return [score + len(text) / 5000 for score, text in zip(exact(completions, golds), completions)]


def numbers_only(completions, golds, **_):
    scores = exact(completions, golds)
    return [score if gold.isdigit() else None for score, gold in zip(scores, golds)]


def constant(completions, **_):
    return [1.0] * len(completions)


def ascii_only(completions, golds, **_):
    return exact([text.encode("ascii").decode() for text in completions], golds)


def slow_pattern(completions, golds, **_):
    slow = [re.match(r"(?:[^\W\d]+)+\d?$", text) for text in completions]
    return [score * (not match) for score, match in zip(exact(completions, golds), slow)]


def format_first(completions, golds, **_):
    boxed = [2.0 * bool(_boxed(text)) for text in completions]
    return [two + score for two, score in zip(boxed, exact(completions, golds))]


def any_of_a_list(completions, golds, **_):
    boxes = [re.findall(r"\\boxed\{([^}]*)\}", text) for text in completions]
    return [float(gold in found) for found, gold in zip(boxes, golds)]


def uneven(completions, solution, **_):
    """Rows with longer golds pay more, in every spelling."""
    pairs = zip(completions, solution, strict=True)
    return [float(len(gold)) if gold in text else 0.0 for text, gold in pairs]
