"""What the Hugging Face libraries print and raise, made shorter."""

from collections.abc import Iterator
from contextlib import contextmanager


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust gave up, such as at a pattern of a tokenizer that takes too
    long; to Python that is no Exception."""
    return type(error).__name__ == "PanicException"


def first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text.split(". ")[0] or type(error).__name__


@contextmanager
def no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()

    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
