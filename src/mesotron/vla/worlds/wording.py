"""Sentences of the blocks worlds; those of HELD_OUT are for evaluation and never trained on."""

TRAINING = (
    "put the {} in the bin",
    "place the {} in the bin",
    "move the {} into the bin",
    "drop the {} in the bin",
    "pick up the {} and put it in the bin",
    "take the {} and place it in the bin",
)
HELD_OUT = (
    "the {} goes into the bin",
    "bring the {} over to the bin and let it go",
    "please get the {} into that bin",
    "I want the {} inside the bin",
)


def put_into_words(template: str, thing: str) -> str:
    """A sentence about a thing.

    Example:
        >>> put_into_words(TRAINING[0], "red cube")
        'put the red cube in the bin'
    """
    return template.format(thing)
