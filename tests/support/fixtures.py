"""What tests of several rooms share: a worker of math-verify, and a small model folder."""

from pathlib import Path

import pytest

from mesotron.answers.facts import Judge
from mesotron.answers.formats import FORMATS
from mesotron.answers.verify import Verifier

TEXTS = ["Solve the problem step by step. 3 + 4 = 7"] * 9


@pytest.fixture(scope="session")
def verifier():
    """One worker, which imports sympy once; it must not see the token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "secret")
        shared = Verifier(timeout=5, num_workers=1)

    with shared:
        yield shared


@pytest.fixture(scope="session")
def judge(verifier) -> Judge:
    return Judge(FORMATS["boxed"], verifier)


@pytest.fixture(scope="session")
def tokenizer():
    from benchmarks.tiny_model import build_tokenizer

    return build_tokenizer(TEXTS, 300)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tokenizer) -> Path:
    """A small model folder as save_pretrained writes it."""
    from benchmarks.tiny_model import build_network

    place = tmp_path_factory.mktemp("model")
    build_network(tokenizer).save_pretrained(place)
    tokenizer.save_pretrained(place)

    return place
