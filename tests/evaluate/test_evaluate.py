"""Evaluation: decoding against Transformers, scores against enumeration, the command."""

import io
import json
import math
import re
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from benchmarks.tiny_model import build_network, build_tokenizer
from mesotron.answers.facts import Facts, no_facts
from mesotron.answers.formats import FORMATS
from mesotron.cli import COMMANDS, main, parse
from mesotron.config import EvalConfig, ModelConfig, TaskConfig, TrainConfig
from mesotron.evaluate import command, scores, transcripts
from mesotron.evaluate.evaluate import evaluate
from mesotron.evaluate.result import (
    Evaluation,
    Greedy,
    describe_format,
    describe_temperature,
    score_greedy,
    score_sampled,
)
from mesotron.evaluate.subject import Subject, find_subject
from mesotron.models.load import load_model
from mesotron.rlvr.run_report import curve_lines, write_report
from mesotron.runs import RunFolder
from mesotron.runs.checkpoints import writing
from mesotron.sampling import decode
from mesotron.sampling.decode import Completion, choose, generate
from mesotron.sampling.decoder import FusedSampler
from mesotron.tasks.load import load_task
from mesotron.tasks.problem import Problem
from mesotron.tasks.prompts import render

TEXTS = ["Mia has 12 apples. 3 + 4 = 7"] * 9
EVAL_PRESETS = COMMANDS["eval"].presets
PROMPTS = ["Mia has " + "1 " * n for n in range(1, 10)]


@pytest.fixture(scope="module")
def random_model():
    tokenizer = build_tokenizer(TEXTS, 300)
    model = build_network(tokenizer).eval()
    with torch.no_grad():  # an end token that comes often, so that rows end at different times
        torch.manual_seed(0)
        model.lm_head.weight *= 3
        model.lm_head.weight[tokenizer.eos_token_id] = 0.3 * torch.randn(128)

    return model, tokenizer


def test_greedy_equals_transformers_generate(random_model):
    model, tokenizer = random_model
    found = generate(model, tokenizer, PROMPTS, max_tokens=24)
    batch = tokenizer(
        PROMPTS, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False
    )

    expected = model.generate(
        **batch,
        max_new_tokens=24,
        do_sample=False,
    )
    for one, ids in zip(found, expected[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
        if tokenizer.eos_token_id in ids:
            ends = ids.index(tokenizer.eos_token_id)
        else:
            ends = 24

        assert list(one.ids) == ids[:ends]
        assert one.truncated == (ends == 24)


@pytest.mark.parametrize("kind", ["GPT2", "Bloom"])
def test_models_with_other_names_in_their_configs(kind, random_model):
    tokenizer = random_model[1]
    sizes = {
        "hidden_size": 16,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": len(tokenizer),
    }

    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert len(generate(model, tokenizer, PROMPTS, max_tokens=3)) == len(PROMPTS)


def test_precision_and_template_fit_the_machine_and_the_run():
    template = {"enable_thinking": False}
    run = Subject("run", ModelConfig(name="tiny", dtype="bfloat16"), template=template)
    model, tokenizer = run.load(torch.device("cpu"))

    assert model.dtype == torch.float32
    tokenizer.chat_template = "{{ enable_thinking }}"
    assert render([{"role": "user", "content": "P"}], tokenizer) == "False"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completions_do_not_depend_on_the_batch(random_model, temperature):
    def run(**changes):
        settings = {
            "max_tokens": 12,
            "temperature": temperature,
            "seed": 5,
        } | changes
        return generate(*random_model, PROMPTS * 2, **settings)

    whole = run(batch=18)
    assert whole == run(batch=7)

    if temperature:  # rows ended at different times, so that dropping them was exercised
        assert len({len(one.ids) for one in whole}) > 3
        assert run(seed=6) != whole
        assert {one.truncated for one in whole} == {True, False}

    for one in whole:  # an end token is one of the twelve, and is removed
        assert one.truncated == (len(one.ids) == 12)
        assert random_model[1].eos_token_id not in one.ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_fused_decoder_writes_the_same(monkeypatch, random_model, temperature):
    """As on a GPU, where evaluations use it; in several batches too."""
    settings = {"max_tokens": 12, "temperature": temperature, "seed": 5}
    expected = generate(*random_model, PROMPTS * 2, **settings)
    monkeypatch.setattr(decode, "on_gpu", lambda model: True)
    monkeypatch.setattr(decode, "_decode", None)

    assert generate(*random_model, PROMPTS * 2, **settings) == expected
    assert generate(*random_model, PROMPTS * 2, batch=7, **settings) == expected


def test_weights_that_leave_no_room_for_a_copy_are_not_copied(monkeypatch, random_model):
    settings = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
    expected = generate(*random_model, PROMPTS, **settings)
    model = random_model[0]
    size = 4 * sum(weight.numel() for weight in model.parameters())

    assert decode.copy_fits(model, torch.float32)
    monkeypatch.setattr(decode, "on_gpu", lambda model: True)
    monkeypatch.setattr(decode, "free_memory", lambda device: int(1.5 * size))
    monkeypatch.setattr(FusedSampler, "_prepare", None)

    assert not decode.copy_fits(model, torch.float32)
    assert decode.copy_fits(model, torch.bfloat16)
    assert generate(*random_model, PROMPTS, batch=2, **settings) == expected


def test_the_type_of_products_is_seen_inside_a_trainer(random_model):
    model = random_model[0]
    assert decode.compute_dtype(model) == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert decode.compute_dtype(model) == torch.bfloat16


def test_choose_inverts_the_cumulative_distribution():
    p = torch.tensor([0.5, 0.0, 0.2, 0.3])
    logits = p.log().expand(1000, 4)
    draws = (torch.arange(1000) + 0.5) / 1000
    counts = torch.bincount(choose(logits, 1.0, draws), minlength=4)

    assert counts.tolist() == [500, 0, 200, 300]
    logits = torch.tensor([[0.0, 2.0]]).expand(1000, 2)
    share = choose(logits, 2.0, draws).float().mean().item()

    assert share == pytest.approx(1 / (1 + math.exp(-1)), abs=2e-3)

    # The last draw below one stays in the vocabulary.
    assert choose(torch.randn(64, 999), 1.0, torch.full((64,), 1 - 2**-24)).max() < 999


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "match"),
    [(["Mia has 12 apples."], 1020, "--max-tokens"), (["Mia", ""], 2, "prompt 1")],
)
def test_invalid_generation_is_refused(random_model, prompts, max_tokens, match):
    with pytest.raises(ValueError, match=match):
        generate(*random_model, prompts, max_tokens=max_tokens)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for right, k in product(range(6), range(1, 6)):
        subsets = list(combinations([True] * right + [False] * (5 - right), k))
        assert scores.pass_at_k(5, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert [scores.powers_of_two(k) for k in (1, 8, 6)] == [[1], [1, 2, 4, 8], [1, 2, 4, 6]]


def test_wilson_against_its_defining_equation():
    # The ends p solve (share - p)^2 = z^2 p (1 - p) / n.
    for right, n in [(0, 7), (3, 7), (150, 200), (7, 7)]:
        score = scores.wilson(right, n)
        for p in (score.low, score.high):
            if 0 < p < 1:
                assert (score.value - p) ** 2 == pytest.approx(1.959964**2 * p * (1 - p) / n)

        assert score.low <= score.value <= score.high


def test_bootstrap_interval():
    values = [0.0, 1.5] * 200
    score = scores.bootstrap(values)
    assert score.value == 0.75
    assert score.high - score.low == pytest.approx(2 * 1.96 * 0.75 / 20, rel=0.1)
    assert scores.bootstrap(values) == score
    assert scores.bootstrap([0.25]) == scores.Score(0.25, 0.25, 0.25)


def test_intervals_of_few_problems_are_honest():
    assert scores.bootstrap([1.0, 0.0, 1.0, 1.0]) == scores.wilson(3, 4)

    # Four right answers of four do not prove that the fifth will be.
    for value in (0.0, 1.0):
        found = scores.bootstrap([value] * 4)
        expected = scores.wilson(int(4 * value), 4)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))

    # No difference on four problems may still be one on the next, in either direction.
    unchanged = scores.bootstrap([0.0] * 4, signed=True)
    assert (unchanged.value, unchanged.low) == (0.0, -unchanged.high)
    assert unchanged.high == scores.wilson(0, 4).high

    # Student's: 3.182 standard errors of four numbers.
    few = scores.bootstrap([0.1, 0.2, 0.3, 0.4])
    assert few.high - few.value == pytest.approx(3.182 * 0.12910 / 2, rel=1e-3)

    # A chance of -2.9 is none.
    chances = scores.bootstrap([0.0, 0.5], share=True)
    assert chances == scores.Score(0.25, 0.0, 1.0)


def test_majority_counts_answers():
    def right(*answers):  # where 7 is right
        return scores.majority_right([(answer, answer == "7") for answer in answers])

    assert right("5", "7", None, None, "7") == 1
    assert right("5", "5", "7") == 0
    assert right("5", "7", "9", None) == pytest.approx(1 / 3)
    assert right(None, None) == 0


def test_samples_of_a_problem_are_adjacent_and_text_has_a_majority_too(
    random_model, judge, monkeypatch
):
    def generate(model, tokenizer, prompts, **_):
        replies = {True: iter(["1 0", "1  0", "0 1"]), False: iter(["5", "5", "7"])}
        boxes = [next(replies["Rotate." in prompt]) for prompt in prompts]
        return [Completion(rf"\boxed{{{box}}}", (1,), False) for box in boxes]

    monkeypatch.setattr(decode, "generate", generate)
    problems = [Problem("Rotate.", "1 0", "p"), Problem("2 + 5?", "7", "q")]
    found = evaluate(
        *random_model,
        problems,
        TaskConfig(),
        samples=3,
        judge=judge,
    )

    assert found.sampled.majority.value == 0.5
    assert found.sampled.pass_at[1].value == pytest.approx((2 / 3 + 1 / 3) / 2)

    with pytest.raises(ValueError, match="num-eval"):
        evaluate(None, None, [], TaskConfig())


def fact(answer: str | None, correct: bool, unformatted: bool = False) -> Facts:
    return replace(
        no_facts(truncated=False),
        answer=answer,
        formatted=answer is not None,
        correct=correct,
        parsed=answer is not None or unformatted,
        correct_unformatted=unformatted,
        graded=True,
    )


RIGHT = fact("7", True)
WRONG = fact("8", False)
BARE = fact(None, False, unformatted=True)
COMPLETION = Completion("", (1, 2, 3), False)


def test_greedy_scores_by_hand():
    problems = [Problem("q", "7", f"p{n}", level) for n, level in enumerate((1, 1, 2, 2))]
    found = score_greedy([COMPLETION] * 4, [RIGHT, WRONG, BARE, RIGHT], problems)
    assert (found.strict.value, found.lenient.value) == (0.5, 0.75)
    assert {level: score.value for level, score in found.by_level.items()} == {"1": 0.5, "2": 0.5}
    assert found.rates["facts/formatted"] == 0.75
    assert found.mean_tokens == 3


def test_sampled_scores_by_hand():
    facts = [RIGHT, RIGHT, RIGHT, WRONG, WRONG, BARE]  # two samples for each of three problems
    found = score_sampled(
        [COMPLETION] * 6,
        facts,
        samples=2,
        temperature=1.0,
        seed=0,
    )

    assert found.pass_at[1].value == pytest.approx((1 + 0.5 + 0) / 3)
    assert found.pass_at[2].value == pytest.approx(2 / 3)
    assert found.majority.value == pytest.approx((1 + 0.5 + 0) / 3)
    assert found.lenient.value == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert found.mixed == pytest.approx(1 / 3)


def test_findings_need_significant_and_large_gaps():
    assert "60.0%" in describe_temperature(scores.Score(0.2, 0.1, 0.3), 0.6, 0.4, 1.0)[0]
    assert "20.0%" in describe_temperature(scores.Score(-0.2, -0.3, -0.1), 0.2, 0.4, 1.0)[0]
    assert describe_temperature(scores.Score(0.2, -0.1, 0.5), 0.6, 0.4, 1.0) == []
    assert describe_temperature(scores.Score(0.01, 0.005, 0.02), 0.6, 0.59, 1.0) == []
    assert "40.0%" in describe_format(0.2, 0.6)[0]
    assert describe_format(0.6, 0.6) == []


def test_the_tiny_model_is_measured():
    model, tokenizer = load_model(ModelConfig())
    task = TaskConfig(levels=(1, 2), num_train=1, num_eval=12)
    model.train()
    problems = load_task(task).eval

    result = evaluate(model, tokenizer, problems, task, max_tokens=32, samples=4)

    assert model.training  # as it was
    assert result.problems == len(result.transcripts) == 12
    assert 0 < result.greedy.rates["facts/formatted"] < 1  # it answers in both ways

    right = sum(one.correct for one in result.transcripts)
    assert result.greedy.strict.value == pytest.approx(right / 12)
    assert list(result.sampled.pass_at) == [1, 2, 4]

    for one in result.transcripts:
        assert one.correct == (FORMATS["boxed"].extract(one.completion) == one.gold)

    again = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert again["greedy"]["strict"]["value"] == result.greedy.strict.value
    assert transcripts.Transcript(**again["transcripts"][0]) == result.transcripts[0]


def transcript(name: str, correct: bool, completion: str = "x") -> transcripts.Transcript:
    return transcripts.Transcript(
        id=name,
        question="q",
        gold="7",
        completion=completion,
        answer="7" if correct else None,
        correct=correct,
        correct_unformatted=False,
        truncated=False,
    )


def result_of(transcripts, measure="accuracy") -> Evaluation:
    """An evaluation of which only the transcripts matter."""
    greedy = Greedy(strict=None, lenient=None, by_level={}, rates={}, mean_tokens=1.0)
    return Evaluation(
        model="m",
        problems=len(transcripts),
        greedy=greedy,
        sampled=None,
        findings=[],
        transcripts=transcripts,
        measure=measure,
    )


def test_the_gain_between_two_evaluations():
    """From 3 of 20 to 16 of 20 problems, two of which were lost."""
    before = [transcript(str(k), k < 3) for k in range(20)]
    after = [transcript(str(k), k >= 2 and k < 18) for k in range(20)]
    gain = command.greedy_gain(result_of(before), result_of(after))
    assert gain.startswith("0.650 [")
    assert command.greedy_gain(result_of(after), result_of(before)).startswith("-0.650 [")

    # By rewards: 0.5 more on the only problem that has one twice.
    paid = [replace(one, reward=reward) for one, reward in zip(before, (0.25, None, 1.0))]
    later = [replace(one, reward=reward) for one, reward in zip(before, (0.75, 1.0, None))]
    gain = command.greedy_gain(result_of(paid, "reward"), result_of(later, "reward"))
    assert gain == "0.500 [0.500, 0.500]"

    # Without a problem that has two rewards there is nothing to say.
    gain = command.greedy_gain(result_of(paid[1:], "reward"), result_of(later[1:], "reward"))
    assert gain == "unknown"


def test_typical_pairs_in_proportion_to_what_changed():
    before = [transcript(str(k), k < 3) for k in range(20)]  # three right, two of them lost
    after = [transcript(str(k), k >= 2 and k < 18) for k in range(20)]
    ids = [pair.before.id for pair in transcripts.pair_up(before, after, 4)]

    assert ids == ["3", "4", "5", "0"]  # 15 gained, 2 lost, 2 still wrong, 1 right both times
    shown = transcripts.describe_changes(before, after)
    assert shown == "15 gained, 2 lost, 2 still wrong, 1 right before and after"
    assert transcripts.pair_up([], [], 4) == []

    pairs = transcripts.pair_up(before, after[::-1], 1)  # paired by problem
    assert (pairs[0].after.id, pairs[0].change) == ("3", "no answer to right")

    for changed, word in (
        ({"answer": "8"}, "wrong"),
        ({"correct_unformatted": True}, "right outside the format"),
        ({"truncated": True}, "cut off"),
    ):
        assert transcripts.verdict(replace(transcript("a", False), **changed)) == word


def test_a_report_has_gaps_where_rows_have_no_value_and_no_escape_codes(tmp_path):
    rows = [
        {
            "step": 1,
            "reward": 0.5,
            "entropy": 1.0,
        },
        {"step": 2, "reward": 0.5},
    ]

    rows.append(
        {
            "step": 3,
            "reward": 0.25,
            "facts/correct": 0.5,
        }
    )

    table = curve_lines(rows)[3:]
    assert [line.count("|") for line in table] == [5] * 5
    assert table[-1] == "| 3 | 0.250 | 0.500 |  |"

    run = RunFolder.create(tmp_path / "run", {}, {})
    evil = vars(transcript("a", False)) | {"gold": "7\x1b[2J\n# Title"}
    ends = {"transcripts": [evil], "greedy": {"rates": {}}}

    text = write_report(
        run,
        TrainConfig(),
        ends,
        ends,
        {"findings": []},
    )

    assert "# Title" in text
    lines = text.splitlines()[1:]
    assert not [line for line in lines if "\x1b" in line or line.startswith("# ")]


def test_side_by_side_escapes_control_characters():
    console = Console(
        width=100,
        record=True,
        file=io.StringIO(),
    )

    evil = "[red]\x1b[2J\x07 done"
    console.print(transcripts.side_by_side([transcript("a", False, evil)], [transcript("a", True)]))
    text = console.export_text()

    assert "[red]\\x1b[2J\\x07 done" in text
    assert "right" in text

    shown = transcripts.shorten("a" * 1000 + "end", limit=20)
    assert (shown[:4], shown[-3:], len(shown) < 60) == ("aaaa", "end", True)


def test_a_run_brings_its_task_and_its_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="runs/last"):
        find_subject("runs/last")

    config = {
        "model": {"name": "tiny"},
        "task": {
            "name": "arith",
            "levels": [2],
            "format": "hashes",
        },
        "rollout": {"max_tokens": 17},
        "trl": ["top_k=20", 'chat_template_kwargs={"enable_thinking": false}'],
    }

    run = RunFolder.create(tmp_path / "runs" / "a", config, {})
    with pytest.raises(ValueError, match="checkpoint"):
        find_subject("runs/a")

    for step in (1, 2):
        with writing(run.checkpoints, step) as draft:
            (draft / "config.json").write_text("{}")

    run.append("metrics", {"step": 1})
    assert find_subject("runs/last").start == ModelConfig(name="tiny")
    assert find_subject("runs/last").template == {"enable_thinking": False}

    for name, step in (("runs/last", 2), ("runs/a/checkpoints/checkpoint-1", 1)):
        assert find_subject(name).model.name.endswith(f"checkpoint-{step}")
        parsed = parse(EvalConfig, [name, "--task.num-eval", "9"], "eval", EVAL_PRESETS)
        assert parsed.task == TaskConfig(
            levels=(2,),
            format="hashes",
            num_eval=9,
        )

        assert parsed.max_tokens == 17

    snake = RunFolder.create(tmp_path / "runs" / "snake", {"num_envs": 4}, {})
    with writing(snake.checkpoints, 1) as draft:
        (draft / "x").write_text("")

    with pytest.raises(ValueError, match="snake"):
        find_subject("runs/snake")


def test_command_prints_a_table_and_writes_json(tmp_path, capsys):
    out = tmp_path / "deep" / "eval.json"
    task = TaskConfig(num_train=1, num_eval=6, levels=(1,))
    assert (
        command.run(
            EvalConfig(
                samples=2,
                model="tiny",
                against="tiny",
                out=out,
                task=task,
            )
        )
        == 0
    )

    printed, progress = capsys.readouterr()
    assert "tiny on 6 problems" in progress  # without a terminal there is no bar
    assert "pass@2, T=1" in printed
    assert re.search(r"greedy gain +0\.000 \[-", printed)  # a model against itself

    first, second = json.loads(out.read_text())
    assert first == second
    assert first["problems"] == 6

    with pytest.raises(ValueError, match="num-eval"):
        command.run(EvalConfig(model="tiny", task=TaskConfig(num_eval=0)))

    with pytest.raises(ValueError, match=r"eval\.json"):
        command.run(EvalConfig(model="no such model", out=Path("/")))  # before it loads a model


@pytest.mark.parametrize("gold", ["answer", "label"])
def test_sampled_rewards_have_a_row_with_gold_and_without(gold, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {k} + 2?", gold: str(k + 2)} for k in range(4)]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text(
        "def score(completions, **kwargs):\n    return [len(text) / 10 for text in completions]\n"
    )

    words = "eval tiny --data mine.jsonl --reward mine.py:score --samples 2 --out scores.json"
    small = "--task.num-eval 2 --max-tokens 8 --device cpu"
    assert main([*words.split(), *small.split()]) == 0
    assert "mean reward, T=1" in capsys.readouterr().out

    (result,) = json.loads(Path("scores.json").read_text())
    assert result["sampled"]["reward"]["value"] > 0
    assert (result["sampled"]["majority"] is None) == (gold == "label")
