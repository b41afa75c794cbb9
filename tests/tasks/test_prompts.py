"""Chat templates, which are code of a model's author: what one may cost."""

import pytest

from mesotron.config import ModelConfig
from mesotron.models.load import load_model
from mesotron.tasks import prompts

CHAT = [{"role": "user", "content": "What is 3 + 4?"}]
ENDLESS = {
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a loop over work": "{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "macros that call twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
    ),
}


@pytest.fixture
def tokenizer():
    return load_model(ModelConfig(name="tiny"))[1]


@pytest.fixture
def small_allowance(monkeypatch):
    monkeypatch.setattr(prompts, "RENDERING_SECONDS", 0.02)
    monkeypatch.setattr(prompts, "SECONDS_PER_PROMPT", 0.0)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped(tokenizer, small_allowance, name):
    tokenizer.chat_template = ENDLESS[name]
    tokenizer.name_or_path = "some/model"

    with pytest.raises(ValueError, match=r"some/model.*CPU time"):
        prompts.render(CHAT, tokenizer)


def test_the_allowance_grows_with_the_prompts(tokenizer, monkeypatch):
    monkeypatch.setattr(prompts, "RENDERING_SECONDS", 0.0)
    monkeypatch.setattr(prompts, "SECONDS_PER_PROMPT", 100.0)

    assert prompts.render_all([CHAT] * 3, tokenizer) == [prompts.render(CHAT, tokenizer)] * 3


def test_a_template_that_raises_is_named(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    tokenizer.name_or_path = "some/model"

    with pytest.raises(ValueError, match=r"some/model.*no such role"):
        prompts.render(CHAT, tokenizer)
