"""docs/extending.md works: each block becomes a file, is imported, and is used by its name."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from mesotron.cli import main, parse
from mesotron.config import (
    ObjectiveConfig,
    OptimConfig,
    RewardConfig,
    RouteConfig,
    TaskConfig,
    TrainConfig,
    WatchConfig,
)
from mesotron.config.base import flags_of
from mesotron.config.flags import value_at
from mesotron.config.registry import ENVIRONMENTS, FORMATS, OBJECTIVES, REWARDS, TASKS
from mesotron.config.rules import SPECTRAL_RULES
from mesotron.rewards.call import make_reward
from mesotron.rlvr.grpo import LossInputs, LossSettings
from mesotron.rlvr.objectives import get_loss, resolve
from mesotron.rlvr.optimizer import build_optimizer
from mesotron.sampling.turns import TurnSampler
from mesotron.tasks.environment import make_columns
from mesotron.tasks.load import load_task
from mesotron.watch.log import read_log
from support.rlvr_tiny import make_tokenizer

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FILE = re.compile(r'"""(\w+)\.py: ')
MAX_LINES = 30


def files() -> dict[str, str]:
    """The blocks that begin with the name of their file."""
    named = {}
    for block in BLOCKS:
        match = FILE.match(block)
        if match:
            named[match[1]] = block

    return named


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the page's files; the registries forget them afterwards."""
    for name, text in files().items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (TASKS, ENVIRONMENTS, REWARDS, OBJECTIVES, FORMATS, SPECTRAL_RULES):
        for name in registry:
            assert registry[name]  # what is imported now stays known afterwards
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    return tmp_path


@pytest.mark.parametrize("name", files())
def test_each_extension_is_short(name):
    lines = files()[name].splitlines()
    assert sum(bool(line.strip()) for line in lines) <= MAX_LINES


@pytest.mark.usefixtures("folder")
def test_a_task():
    with pytest.raises(ValueError, match="squares"):
        TaskConfig(name="squares")

    importlib.import_module("squares")
    task = load_task(TaskConfig(name="squares", num_eval=20))

    assert (len(task.train), len(task.eval)) == (500, 20)
    first = task.train[0]
    n = int(re.findall(r"\d+", first.question)[0])
    assert first.gold == str(n * n)


@pytest.mark.usefixtures("folder")
def test_a_reward(judge):
    importlib.import_module("brief")
    reward = make_reward(RewardConfig(parts=("brief",)), judge, max_tokens=8)

    texts = [r"\boxed{7}", r"\boxed{7}", r"\boxed{8}", r"\boxed{7}"]
    ids = [[1] * 4, [1] * 5, [1], [1]]
    golds = ["7", "7", "7", None]
    assert reward(texts, ids, golds, [False] * 4) == [1.0, 0.5, 0.0, None]


def test_a_log_format(folder):
    log = folder / "train.log"
    log.write_text("Loading\n<7> Prize 0.25 | Actor Loss 0.1\n")
    with pytest.raises(ValueError, match="arcade"):
        WatchConfig(kind="arcade")
    with pytest.raises(ValueError, match="no row"):
        read_log(log)

    importlib.import_module("arcade")
    read = read_log(log)
    assert read.kind == WatchConfig(kind="arcade").kind
    assert read.rows == [{"step": 7, "reward": 0.25, "loss": 0.1}]


@pytest.mark.usefixtures("folder")
def test_an_objective():
    importlib.import_module("reinforce")
    config = resolve(ObjectiveConfig(name="reinforce"), generations=2)
    reinforce = get_loss(config)

    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        advantages=torch.tensor([1.0, -1.0]),
        mask=torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        ratio=torch.ones(2, 2),
        settings=LossSettings(objective=reinforce),
        num_tokens=torch.tensor(3.0),
    )

    value = reinforce.loss(inputs).mean.value
    value.backward()
    assert value.item() == pytest.approx(((1 + 2) / 2 - 3) / 2)
    assert logprobs.grad.tolist() == [[-0.25, -0.25], [0.5, 0.0]]


@pytest.mark.usefixtures("folder")
def test_an_environment():
    with pytest.raises(ValueError, match="doubling"):
        TaskConfig(env=("doubling:30",))

    importlib.import_module("doubling")
    config = TaskConfig(env=("doubling:30",), num_eval=5)
    task = load_task(config)
    assert (len(task.train), len(task.eval)) == (25, 5)

    tokenizer = make_tokenizer()
    six = tokenizer.encode("6 <eos>")
    sampler = TurnSampler(config.env, tokenizer)
    rows = [{"columns": make_columns("doubling:30", number)} for number in (3, 4)]
    episodes = sampler.sample(rows, lambda contexts, _: ([six] * len(contexts), None), 8)
    sampler.close()
    assert [one.played.reward for one in episodes] == [1, 0]


@pytest.mark.usefixtures("folder")
def test_an_optimizer_rule():
    signed = importlib.import_module("signed")
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2))
    optimizer = build_optimizer(model, OptimConfig(name="signed", lr=0.1))
    assert isinstance(optimizer, signed.Signed)

    hidden = model[1].weight
    start = hidden.detach().clone()
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)

    optimizer.step()
    sizes = (hidden.detach() - start).abs()
    torch.testing.assert_close(sizes, sizes.mean().expand_as(sizes))


@pytest.mark.usefixtures("folder")
def test_an_optimizer_rule_in_jax_is_the_twin_of_torchs():
    jnp = pytest.importorskip("jax.numpy")
    signed = importlib.import_module("signed")
    twin = importlib.import_module("signed_jax")

    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(torch.zeros(6, 4))
    weight.grad = gradient
    signed.Signed([weight], lr=0.1, weight_decay=0.0).step()

    rule = twin.signed(lr=0.1)
    tree = {"weight": jnp.zeros((6, 4))}
    update, _ = rule.update({"weight": jnp.array(gradient.numpy())}, rule.init(tree), tree)

    step = torch.tensor(update["weight"].tolist())
    torch.testing.assert_close(step, weight.detach(), rtol=1e-2, atol=1e-4)


@pytest.mark.usefixtures("folder")
def test_the_command_line_knows_them(capsys):
    importlib.import_module("squares")
    importlib.import_module("brief")

    assert main(["check", "brief", "--task", "squares"]) == 0
    assert "brief on" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("module", "config_type", "flag", "name"),
    [
        ("squares", TrainConfig, "--task", "squares"),
        ("brief", TrainConfig, "--reward", "brief"),
        ("reinforce", TrainConfig, "--objective.name", "reinforce"),
        ("signed", TrainConfig, "--optim", "signed"),
        ("signed", RouteConfig, "--optim", "signed"),
        ("arcade", WatchConfig, "--kind", "arcade"),
    ],
)
def test_a_name_is_a_choice_of_its_flag_once_it_is_registered(module, config_type, flag, name):
    required = ["tiny"] if config_type is RouteConfig else []
    words = [*required, flag, name]
    if flag != "--reward":  # whose names are looked up when the reward is made
        with pytest.raises(ValueError, match=name):
            parse(config_type, words)

    importlib.import_module(module)
    place = flags_of(config_type)[flag].path
    assert value_at(parse(config_type, words), place) in (name, (name,))
