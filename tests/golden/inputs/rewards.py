"""Rewards of one's own."""


def even(completions, **_):
    """The share of even digits."""
    scores = []
    for text in completions:
        digits = [int(letter) for letter in text if letter.isdigit()]
        scores.append(sum(digit % 2 == 0 for digit in digits) / max(len(digits), 1))

    return scores


def close(completions, gold, **_):
    """Pays less the further the last number is from the gold answer."""
    scores = []
    for text, answer in zip(completions, gold, strict=True):
        digits = "".join(letter for letter in text if letter.isdigit())[-3:]
        scores.append(1 / (1 + abs(int(digits or 999) - int(answer))))

    return scores
