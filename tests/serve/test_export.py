"""After training: exported weights against the adapter model, the card, the chat, the doctor."""

import builtins
import io
import sys
from unittest.mock import Mock

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from mesotron.cli import main
from mesotron.config import ChatConfig, ModelConfig, RewardConfig, TrainConfig
from mesotron.models.adapters import lora_config
from mesotron.models.load import load_model
from mesotron.runs import RunFolder
from mesotron.runs.checkpoints import writing
from mesotron.runs.doctor import Gpu, list_gpus
from mesotron.serve import chat

IDS = torch.tensor([[5, 6, 7, 20, 30]])
SCORE = {"low": 0.2, "high": 0.4}


def make_run(path, rank, model="tiny"):
    """A finished run whose weights differ from the start's; its model and its start."""
    lora = ModelConfig(name=model, lora=rank)
    start, _ = load_model(ModelConfig(name=model))
    trained, tokenizer = load_model(ModelConfig(name=model))
    torch.manual_seed(0)

    if rank:
        trained = get_peft_model(trained, lora_config(lora)).eval()

    with torch.no_grad():
        for name, weight in trained.named_parameters():
            if "lora_B" in name or (not rank and "mlp" in name):
                weight += 0.05 * torch.randn_like(weight)

    reward = RewardConfig(parts=("two_part", "length"), weights=(1.0, 0.25))
    run = RunFolder.create(
        path,
        TrainConfig(
            model=lora,
            reward=reward,
            steps=3,
        ),
        {"device": "cpu"},
    )
    with writing(run.checkpoints, 3) as draft:
        trained.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

    for step in (1, 2, 3):
        run.append("metrics", {"step": step, "reward": 0.5})

    values = {"before": 0.25, "after": 0.5, "gain": 0.375}
    scores = {key: {"value": value, **SCORE} for key, value in values.items()}
    run.save(
        "result",
        {
            "problems": 8,
            **scores,
            "findings": [],
        },
    )

    return trained, start


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "runs" / "mine"
    return folder, *make_run(folder, rank=4)


@pytest.mark.parametrize(
    ("flags", "dtype", "close"),
    [
        ([], torch.float32, {"atol": 2e-5, "rtol": 1e-4}),
        (["--dtype", "bf16"], torch.bfloat16, {"atol": 0.2, "rtol": 0.05}),
    ],
)
def test_merged_weights_load_alone_and_agree_with_the_adapter(
    lora_run, tmp_path, capsys, flags, dtype, close
):
    folder, trained, start = lora_run
    out = tmp_path / "merged"
    assert main(["export", str(folder), "--merge-lora", *flags, "--out", str(out)]) == 0
    assert f'AutoModelForCausalLM.from_pretrained("{out}")' in capsys.readouterr().out

    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.dtype == dtype

    with torch.no_grad():
        expected = trained(IDS).logits
        torch.testing.assert_close(merged(IDS).logits.float(), expected, **close)
        assert (start(IDS).logits - expected).abs().max() > 0.1

    assert AutoTokenizer.from_pretrained(out).decode([20, 30])


def test_a_failing_converter_is_named_and_the_weights_stay(lora_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "convert_hf_to_gguf.py").write_text("import no_such_package")
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    out = tmp_path / "out"
    words = ["export", str(lora_run[0]), "--merge-lora", "--gguf", "--out", str(out)]

    assert main(words) == 2
    assert "no_such_package" in capsys.readouterr().err
    assert (out / "model.safetensors").is_file()


def test_adapters_alone_load_with_peft(lora_run, tmp_path):
    folder, trained, start = lora_run
    out = tmp_path / "adapter"
    assert main(["export", str(folder), "--out", str(out)]) == 0
    assert "AutoPeftModelForCausalLM" in (out / "README.md").read_text()
    assert not (out / "model.safetensors").exists()

    wrapped = PeftModel.from_pretrained(start, out)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(IDS).logits, trained(IDS).logits)
        wrapped.unload()


def test_only_named_files_of_a_checkpoint_are_exported(tmp_path):
    folder = tmp_path / "runs" / "gift"
    make_run(folder, rank=2)
    checkpoint = folder / "checkpoints" / "checkpoint-3"
    (checkpoint / ".token").write_text("secret")  # a manifest leaves hidden files out

    assert main(["export", str(folder)]) == 0
    exported = {path.name for path in (folder / "export").iterdir()}
    assert exported == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("name", [".token", "adapter_x", "my_token", "vocab.txt"])
def test_a_link_in_a_checkpoint_is_never_exported(tmp_path, capsys, name):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = tmp_path / "runs" / "gift"
    make_run(folder, rank=2)
    checkpoint = folder / "checkpoints" / "checkpoint-3"
    (checkpoint / name).symlink_to(secret)

    for place in (folder, checkpoint):
        assert main(["export", str(place), "--out", str(tmp_path / "out")]) == 2
        assert name in capsys.readouterr().err

    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_named_must_be_whole(tmp_path, capsys):
    folder = tmp_path / "runs" / "gift"
    make_run(folder, rank=2)
    checkpoint = folder / "checkpoints" / "checkpoint-3"
    (checkpoint / "adapter_x").write_text("secret")

    assert main(["export", str(checkpoint)]) == 2
    assert "adapter_x" in capsys.readouterr().err
    assert not (folder / "export").exists()


def test_a_folder_that_holds_anything_is_not_exported_to(lora_run, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "env.json").write_text("{}")  # which a killed start leaves in a new run's folder

    assert main(["export", str(lora_run[0]), "--out", str(out)]) == 2
    assert "--out" in capsys.readouterr().err


def test_the_card_carries_the_evidence_and_no_local_path(tmp_path):
    for part in load_model(ModelConfig(name="tiny")):
        part.save_pretrained(tmp_path / "base")

    folder = tmp_path / "runs" / "full"
    trained, _ = make_run(folder, 0, str(tmp_path / "base"))
    config = RunFolder(folder).config
    config["task"]["system"] = "Think.\n" * 100  # longer than a file's name may be
    RunFolder(folder).save("config", config)

    assert main(["export", str(folder)]) == 0
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(folder / "export")
        torch.testing.assert_close(again(IDS).logits, trained(IDS).logits)

    card = (folder / "export" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")

    for text in ("0.375", "two_part x 1, length x 0.25", "## The watch", "| optim.name | muon |"):
        assert text in card

    assert f"| task.system | {'Think. ' * 100}|" in card

    # Defaults, local paths, and a base that is not on the hub are left out.
    assert [text for text in ("temperature", str(tmp_path), "base_model") if text in card] == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gguf"], "--merge-lora"),
        (["--gguf", "--merge-lora"], "convert_hf_to_gguf.py"),
        (["--push", "me"], "USER/NAME"),
        (["--push", "me/model"], "hf upload me/model"),
        (["--out", "full"], "--out"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_loaded(
    lora_run, arguments, named, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")  # of a model, not of a run

    assert main(["export", str(lora_run[0]), *arguments]) == 2
    error = capsys.readouterr().err
    assert (named in error, "--resume" in error) == (True, False)
    assert not (lora_run[0] / "export").exists()


def test_one_answer_of_both_models(lora_run, capsys, monkeypatch):
    folder, _, _ = lora_run
    words = ["--prompt", "What is 3 + 4?", "--max-tokens", "12", "--device", "cpu"]
    assert main(["chat", str(folder), "--compare", *words]) == 0

    printed = capsys.readouterr().out
    assert "tiny (before)" in printed
    assert main(["chat", "tiny", "--compare", *words]) == 2
    assert "--compare" in capsys.readouterr().err

    # The system prompt is that of training, and a conversation remembers.
    config = ChatConfig(
        model=str(folder),
        max_tokens=4,
        device="cpu",
    )

    subject = chat.find_subject(str(folder))
    (system,) = chat.system_of(config, subject)
    assert "\\boxed" in system["content"]

    one = chat.Conversation(subject, [system], config)
    one.answer("What is 1 + 1?")
    one.answer("And 2 + 2?")

    assert [m["role"] for m in one.messages] == ["system", *["user", "assistant"] * 2]


def test_a_conversation_ends_without_a_traceback(lora_run, capsys, monkeypatch):
    words = ["chat", str(lora_run[0]), "--max-tokens", "4", "--device", "cpu"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 3 + 4?\n\n/new\nWhat is 1 + 1?\n"))
    assert main(words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2

    monkeypatch.setattr(builtins, "input", Mock(side_effect=KeyboardInterrupt))
    assert main(words) == 0


def test_doctor_reads_the_driver_and_says_what_is_slow(tmp_path, monkeypatch, capsys):
    assert main(["doctor"]) == 0  # of this machine
    program = tmp_path / "nvidia-smi"
    lines = ("Tesla T4, 15360, 1024, 550.54, 7.5", "NVIDIA B200, 183296, 0, 580.1, 10.0")
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    list_gpus.cache_clear()

    try:
        newer = Gpu("NVIDIA B200", 179.0, 0.0, "580.1", (10, 0))
        assert list_gpus() == (
            Gpu(
                "Tesla T4",
                15.0,
                1.0,
                "550.54",
                (7, 5),
            ),
            newer,
        )

        assert main(["doctor"]) == 0
    finally:
        list_gpus.cache_clear()

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    marks = {subject: mark for mark, subject, *_ in lines}
    assert marks.keys() >= {"mesotron", "packages", "extra", "cpu", "disk"}
    assert (marks["gpu"], marks["bfloat16"], marks["kernels"]) == ("ok", "slow", "slow")
