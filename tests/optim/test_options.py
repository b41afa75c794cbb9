"""The keywords of `mesotron.muon` and its siblings are listed, and misspelled ones are answered."""

import inspect

import pytest
from torch import nn

import mesotron
from mesotron.optim.options import OptimizerOptions, options_of

FUNCTIONS = ["muon", "normuon", "pion", "muon_sgd", "adamw"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_signature_lists_every_option_with_its_default(name):
    shown = inspect.signature(getattr(mesotron, name)).parameters
    assert shown["lr"].default == 1e-3
    assert all(one.kind is not one.VAR_KEYWORD for one in shown.values())

    options = options_of(mesotron.Muon)
    assert {key: shown[key].default for key in options} == {
        key: option.default for key, option in options.items()
    }


def test_type_checkers_see_the_same_options():
    assert set(OptimizerOptions.__annotations__) == set(options_of(mesotron.Muon))


@pytest.mark.parametrize(
    ("given", "meant"),
    [("learning_rate", "lr"), ("wd", "weight_decay"), ("momentums", "momentum")],
)
def test_a_misspelled_option_is_answered_with_the_right_one(given, meant):
    with pytest.raises(TypeError, match=f"{given}.*{meant}"):
        mesotron.muon(nn.Linear(4, 4), **{given: 0.1})


def test_only_public_names_are_listed():
    assert set(dir(mesotron)) == set(mesotron.__all__)
