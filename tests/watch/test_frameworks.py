"""Other frameworks' logs, written here in their formats: every key with a meaning is read, in our
units, without a flag."""

import json
from collections.abc import Callable

import pytest

from mesotron.watch.log import read_log
from mesotron.watch.metrics import canonical, guess_reward, sources, suggest_names

STEPS = (1, 2, 3)

TRL = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "num_tokens": "tokens",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "truncated",
    "rewards/format_reward/mean": "formatted",
    "rewards/accuracy_reward/mean": "correct",
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "zero_signal",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clipped",
    "sampling/sampling_logp_difference/mean": "gap_logp",
    "step_time": "step_time",
    "sampling/importance_sampling_ratio/mean": "gap_ratio",
    "rewards/accuracy_reward/std": "",
    "completions/max_length": "",
    "epoch": "",
}
FRAMEWORKS: dict[str, dict[str, str]] = {
    "trl": TRL,
    "trl_old": {
        "loss": "loss",
        "rewards/format_reward_func": "formatted",
        "reward": "reward",
        "rewards/correctness_reward_func": "correct",
        "reward_std": "reward_std",
        "kl": "kl",
        "completion_length": "length",
        "grad_norm": "grad_norm",
        "clip_ratio": "clipped",
    },
    "unsloth": {
        name.replace("/", " / ").replace("loss", "Training Loss"): metric
        for name, metric in TRL.items()
        if not name.startswith(("samp", "learn", "epoch"))
    },
    "ms_swift": {name: metric for name, metric in TRL.items() if name != "entropy"}
    | {
        "entropy/mean": "entropy",
        "rollout_correction/k3_kl": "gap_kl",
        "rollout_correction/ess": "gap_ess",
        "rollout_correction/clipped_frac": "gap_cut",
    },
    "verl": {
        "critic/score/mean": "reward",
        "critic/rewards/mean": "",
        "critic/score/max": "reward_max",
        "response_length/mean": "length",
        "response_length/clip_ratio": "truncated",
        "actor/entropy": "entropy",
        "actor/pg_loss": "loss",
        "actor/grad_norm": "grad_norm",
        "actor/lr": "lr",
        "actor/kl_loss": "kl",
        "actor/ppo_kl": "update_kl",
        "actor/pg_clipfrac": "clipped",
        "timing_s/step": "step_time",
        "response/aborted_ratio": "errors",
        "val-core/openai/gsm8k/acc/mean@1": "heldout",
        "training/rollout_probs_diff_mean": "gap_prob",
        "rollout_corr/k3_kl": "gap_kl",
        "rollout_corr/rollout_is_mean": "gap_ratio",
        "critic/grad_norm": "",
        "training/off_policy/trajectory_staleness/mean": "staleness",
    },
    "prime_rl": {
        "train/agg/effective/math/reward/mean": "reward",
        "train/agg/effective/num_output_tokens/mean": "length",
        "train/agg/effective/math/is_truncated/mean": "truncated",
        "train/agg/all/math/solved_none": "all_wrong",
        "train/agg/all/math/solved_all": "all_right",
        "train/agg/all/math/has_error/mean": "errors",
        "entropy/all/mean": "entropy",
        "loss/mean": "loss",
        "eval/aime/effective/math/avg@4": "heldout",
        "optim/grad_norm": "grad_norm",
        "optim/lr": "lr",
        "time/step": "step_time",
        "mismatch_kl/all/mean": "gap_kl",
        "mismatch_kl/all/max": "",
        "is_masked/mean": "gap_cut",
        "off_policy/mean": "staleness",
    },
    "openrlhf": {
        "train/reward": "reward",
        "train/response_length": "length",
        "train/policy_loss": "loss",
        "train/kl": "kl",
        "train/entropy_loss": "entropy",
        "train/actor_grad_norm": "grad_norm",
        "train/actor_lr": "lr",
        "train/timing/step_total": "step_time",
        "train/rollout/truncated_rate": "truncated",
        "train/ppo_kl": "update_kl",
        "train/ppo_clip_ratio": "clipped",
        "train/vllm_kl": "gap_kl",
        "eval/eval_math500_pass1": "heldout",
        "train/critic_loss": "",
    },
    "nemo_rl": {
        "train/reward": "reward",
        "train/loss": "loss",
        "train/grad_norm": "grad_norm",
        "train/lr": "lr",
        "validation/accuracy": "heldout",
        "train/mean_gen_tokens_per_sample": "length",
        "train/truncation_rate": "truncated",
        "train/approx_entropy": "entropy",
        "train/kl_penalty": "kl",
        "timing/train/total_step_time": "step_time",
        "train/baseline_reward/pct_0": "all_wrong",
        "train/baseline_reward/pct_1": "all_right",
        "train/token_mult_prob_error": "gap_logp",
        "train/gen_kl_error": "gap_kl",
        "train/sampling_importance_ratio": "gap_ratio",
        "train/is_oob_ratio": "gap_cut",
    },
    "slime": {
        "rollout/raw_reward": "reward",
        "rollout/response_len/mean": "length",
        "rollout/truncated_ratio": "truncated",
        "rollout/repetition_frac": "repetition",
        "train/entropy_loss": "entropy",
        "train/pg_loss": "loss",
        "train/kl_loss": "kl",
        "train/lr-pg_0": "lr",
        "train/train_rollout_logprob_abs_diff": "gap_logp",
        "train/tis": "gap_ratio",
        "train/tis_clipfrac": "gap_cut",
        "train/ppo_kl": "update_kl",
        "rollout/zero_std/count_0": "",
        "rollout/kl": "",
    },
    "skyrl": {
        "reward/avg_raw_reward": "reward",
        "generate/avg_num_tokens": "length",
        "policy/final_loss": "loss",
        "policy/policy_entropy": "entropy",
        "policy/policy_kl": "kl",
        "policy/grad_norm": "grad_norm",
        "policy/policy_lr": "lr",
        "eval/all/avg_score": "heldout",
        "async/staleness_mean": "staleness",
        "policy/rollout_train_logprobs_abs_diff_mean": "gap_logp",
        "policy/loss_metrics/is_ratio_mean": "gap_ratio",
    },
    "areal": {
        "ppo_actor/task_reward/avg": "reward",
        "ppo_actor/no_eos_ratios/avg": "truncated",
        "ppo_actor/update/entropy/avg": "entropy",
        "ppo_actor/update/actor_loss/avg": "loss",
        "ppo_actor/update/grad_norm": "grad_norm",
        "eval-rollout/reward": "heldout",
        "ppo_actor/seq_len/avg": "sequence_length",
        "ppo_actor/prompt_len/avg": "prompt_length",
        "ppo_actor/update/behave_approx_kl/avg": "gap_kl",
        "ppo_actor/update/behave_imp_weight/avg": "gap_ratio",
    },
    "art": {
        "train/reward": "reward",
        "val/reward": "heldout",
        "loss/train": "loss",
        "loss/entropy": "entropy",
        "loss/kl_div": "kl",
        "loss/grad_norm": "grad_norm",
        "loss/learning_rate": "lr",
    },
    "tinker": {
        "env/all/reward/total": "reward",
        "env/all/ac_tokens_per_turn": "length",
        "env/all/correct": "correct",
        "env/all/by_group/frac_mixed": "mixed",
        "env/all/by_group/frac_all_good": "all_right",
        "optim/entropy": "entropy",
        "env/all/by_group/frac_all_bad": "all_wrong",
        "optim/lr": "lr",
        "optim/kl_sample_train_v2": "gap_kl",
        "time/total": "step_time",
        "test/env/all/reward/total": "heldout",
        "env/all/ob_tokens_per_turn": "",
    },
    "torchforge": {
        "reward/evaluate_response/avg_total_reward": "reward",
        "rl_trainer/avg_loss": "loss",
        "generator/generate/avg_tokens_generated": "length",
        "rl_trainer/learning_rate": "lr",
    },
    "verifiers": {
        "reward": "reward",
        "entropy": "entropy",
        "tokens/completion": "length",
        "mismatch_kl": "gap_kl",
        "importance_ratio": "gap_ratio",
    },
    "own_trainer": {
        "rewards_avg": "reward",
        "train_accuracies_avg": "correct",
        "kl_avg": "kl",
        "val_accuracies_avg": "heldout",
        "avgCompletionLen": "length",
    },
}
UNITS: dict[str, Callable[[float], float]] = {
    "train/baseline_reward/pct_0": lambda x: 100 * x,
    "train/baseline_reward/pct_1": lambda x: 100 * x,
    "train/token_mult_prob_error": lambda x: 2.718281828459045**x,
    "train/vllm_kl": lambda x: -x,
}


def rows_of(framework: str) -> list[dict[str, float]]:
    """Three steps; the value of the k-th name is (k + step / 10) / 100, in the framework's unit."""
    names = FRAMEWORKS[framework]
    return [
        {name: UNITS.get(name, float)((k + step / 10) / 100) for k, name in enumerate(names, 1)}
        for step in STEPS
    ]


def lines(rows, step: str = "step", wrap=lambda row: row) -> str:
    made = ({step: number} | wrap(row) for number, row in zip(STEPS, rows))
    return "".join(json.dumps(row) + "\n" for row in made)


def notebook(rows) -> str:
    header = "".join(f"<th>{name}</th>" for name in ("Step", *rows[0]))
    body = "".join(
        "<tr>" + "".join(f"<td>{x}</td>" for x in (step, *row.values())) + "</tr>"
        for step, row in zip(STEPS, rows)
    )
    output = {"data": {"text/html": [f"<table><tr>{header}</tr>", f"{body}</table>"]}}

    return json.dumps({"cells": [{"cell_type": "markdown"}, {"outputs": [output]}]})


def two_processes(rows) -> str:
    """prime-rl's trainer is a step behind its orchestrator, and both append to one file."""
    ahead = ("train/agg", "eval/")
    orchestrator, trainer = (
        [
            {k: x for k, x in row.items() if k.startswith(ahead) == is_ahead or k == "time/step"}
            for row in rows
        ]
        for is_ahead in (True, False)
    )

    order = [
        (1, orchestrator),
        (2, orchestrator),
        (1, trainer),
        (3, orchestrator),
        (2, trainer),
        (3, trainer),
    ]
    return "".join(json.dumps({"step": n, "time": 1e9} | rows[n - 1]) + "\n" for n, rows in order)


def slime_console(rows) -> str:
    def split(row, prefix):
        return {key: x for key, x in row.items() if key.startswith(prefix)}

    return "".join(
        f"(RolloutManager pid=9) [2026-01-01] data.py:12 - rollout {n}: {split(row, 'rollout')}\n"
        f"(TrainActor pid=7) INFO model.py:55 - step {n}: {split(row, 'train')}\n"
        for n, row in zip(STEPS, rows)
    )


def skyrl_console(rows) -> str:
    def quoted(row):
        return "".join(f"  '{name}': '{value:.6f}',\n" for name, value in row.items())

    return "".join(f"INFO Step {n}:\n{{\n{quoted(row)}}}\nINFO x\n" for n, row in zip(STEPS, rows))


def forge_console(rows) -> str:
    def block(row):
        return "".join(f"  {name}: {value}\n" for name, value in row.items())

    bar = "=" * 30
    return "".join(
        f"=== [reduce] - METRICS STEP {n} ===\n{block(row)}{bar}\n" for n, row in zip(STEPS, rows)
    )


def chart(rows) -> str:
    """W&B's export of a chart, with the extremes of each point."""
    names = [*rows[0]]
    header = ["Step", *(f"run-1 - {name}{end}" for name in names for end in ("", "__MIN"))]
    body = [[n, *(x for name in names for x in (row[name], -9))] for n, row in zip(STEPS, rows)]

    return "\n".join(",".join(f'"{cell}"' for cell in line) for line in (header, *body)) + "\n"


FILES: dict[str, tuple[str, Callable[[list[dict[str, float]]], str]]] = {
    "trl": (
        "trainer_state.json",
        lambda rows: json.dumps(
            {"log_history": [{"step": n} | row for n, row in zip(STEPS, rows)]}
        ),
    ),
    "trl_old": ("train.log", lambda rows: "".join(f"{row}\n 3%| | 1/9\n" for row in rows)),
    "unsloth": ("grpo.ipynb", notebook),
    "ms_swift": (
        "logging.jsonl",
        lambda rows: "".join(
            json.dumps(row | {"global_step/max_steps": f"{n}/100"}) + "\n"
            for n, row in zip(STEPS, rows)
        ),
    ),
    "verl": (
        "verl.out",
        lambda rows: "".join(
            f"(TaskRunner pid=3) step:{n} - "
            + " - ".join(f"{k}:{x}" for k, x in row.items())
            + "\n"
            for n, row in zip(STEPS, rows)
        ),
    ),
    "prime_rl": ("metrics.jsonl", two_processes),
    "openrlhf": ("wandb_export.csv", chart),
    "nemo_rl": ("nemo.jsonl", lines),
    "slime": ("slime.log", slime_console),
    "skyrl": ("skyrl.log", skyrl_console),
    "areal": ("areal.jsonl", lambda rows: lines(rows, "global_step")),
    "art": ("history.jsonl", lines),
    "tinker": ("metrics.jsonl", lambda rows: lines(rows, "progress/batch")),
    "torchforge": ("forge.txt", forge_console),
    "verifiers": ("verl_like.jsonl", lambda rows: lines(rows, wrap=lambda row: {"data": row})),
    "own_trainer": (
        "grpo_metrics.json",
        lambda rows: json.dumps({name: [row[name] for row in rows] for name in rows[0]}),
    ),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_frameworks_log_is_read_without_a_flag(framework, tmp_path):
    name, write = FILES[framework]
    path = tmp_path / name
    path.write_text(write(rows_of(framework)))
    log = read_log(path)

    assert [row["step"] for row in log.rows] == list(STEPS)
    for step, row in zip(STEPS, log.rows):
        values = canonical(row)
        expected = {
            metric: (k + step / 10) / 100
            for k, metric in enumerate(FRAMEWORKS[framework].values(), 1)
            if metric
        }
        assert {metric: values[metric] for metric in expected} == pytest.approx(expected, abs=1e-6)

    without = {name for name, metric in FRAMEWORKS[framework].items() if not metric}
    assert not without & {key for keys in sources(log.rows[0]).values() for key in keys}


def test_numbers_that_follow_from_others():
    assert canonical({"rollout/kl": 0.5}) == {"kl": 0.5}  # slime's: to the reference
    areal = canonical({"ppo_actor/seq_len/avg": 300.0, "ppo_actor/prompt_len/avg": 100.0})
    assert areal["length"] == 200.0

    counts = canonical(
        {
            "batch/solve_none": 12,
            "batch/solve_all": 2,
            "batch/solve_partial": 2,
        }
    )

    assert counts["all_wrong"] == 0.75
    assert counts["zero_signal"] == 0.875
    assert canonical({"batch/solve_none": 12, "batch/solve_all": 3}) == {}  # of how many?
    assert canonical({"env/all/by_group/frac_mixed": 0.25})["zero_signal"] == 0.75

    # A share may be all of the groups, which is no count of one.
    mixed = canonical({"env/all/by_group/frac_mixed": 1.0, "env/all/by_group/frac_all_bad": 0.0})
    assert (mixed["mixed"], mixed["all_wrong"], mixed["zero_signal"]) == (1, 0, 0)
    assert canonical({"env/all/by_group/frac_all_bad": 1.0})["all_wrong"] == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "12:00 SUCCESS Step 7 | 12.3s | Loss 0.25 | Entropy 0.5 | Mismatch KL 0.0020",
            {"loss": 0.25, "entropy": 0.5, "gap_kl": 0.002},
        ),
        (
            "Step 7 | 30s | Reward 0.5000 | Throughput 900 tokens/s | Truncation 1.0%",
            {"reward": 0.5, "truncated": 0.01},
        ),
        (
            "[Step 7/100] loss=0.25, mean_reward=0.5, kl: 1e-3",
            {"loss": 0.25, "reward": 0.5, "kl": 0.001},
        ),
        ("iteration 7: avg reward: 0.5; grad norm: nan", {"reward": 0.5}),
        ("Epoch 1, batch 7: mean reward = 0.5", {"reward": 0.5}),
        ("iteration 1,007 | reward 0.5", {"reward": 0.5}),
        ("Step      7  reward:   0.500  mean length  1,024.5", {"reward": 0.5, "length": 1024.5}),
    ],
)
def test_lines_that_trainers_print(line, expected, tmp_path):
    path = tmp_path / "console.log"
    path.write_text(f"step 6: saved 3 files\n{line}\nstep 8 of the plan: restart\n")
    (row,) = read_log(path).rows

    assert row["step"] in (7, 1007)
    assert canonical(row).items() >= expected.items()


def test_steps_within_epochs_are_added_up(tmp_path):
    path = tmp_path / "minimind.log"
    path.write_text(
        "loading the model\n"
        "Epoch:[1/2](499/500), Reward: -0.4673, KL_ref: -0.0005, Adv Std: 1.1545, "
        "Actor Loss: 0.0097, Avg Response Len: 100.25, Learning Rate: 0.00000030\n"
        "Epoch:[2/2](1/500), Reward: 0.5000, KL_ref: 0.0010, Avg Len: 120.00, LR: 0.00000030\n"
        "Epoch [2/2], Step [20/500], Loss: 0.2500, Reward: 0.6000\n"
    )
    log = read_log(path)

    assert [row["step"] for row in log.rows] == [499, 501, 520]
    assert canonical(log.rows[0]) == {
        "reward": -0.4673,
        "kl": 0.0005,  # it is a signed estimate
        "loss": 0.0097,
        "length": 100.25,
        "lr": 3e-7,
    }
    assert canonical(log.rows[1])["length"] == 120.0
    assert canonical(log.rows[2]) == {"reward": 0.6, "loss": 0.25}


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        (
            "reward",
            "Average Reward|episode_reward_mean|rollout/mean_score|grpo/rewards.mean|"
            "charts/episodic_return|RewardMean|train-reward|Train/total_reward",
        ),
        ("reward_std", "std_reward|group_reward_std|rewards/std"),
        ("length", "response_len|avg_completion_tokens|mean gen length|completion_length/mean"),
        ("entropy", "policy_entropy|mean_token_entropy|Entropy"),
        ("kl", "kl_divergence|ref_kl|mean_kl|policy/kl_ref|KL Loss"),
        ("update_kl", "approx_kl|train/approx_kl|old_kl"),
        ("grad_norm", "gradient_norm|total_grad_norm|gradNorm|train/grad-norm"),
        ("lr", "optimizer/lr|Learning Rate|train/learning_rate"),
        ("loss", "train_loss|pg_loss|policy_gradient/loss|grpo_loss".replace("_gradient", "")),
        ("formatted", "rewards/correct_tool_format/mean|format_rate"),
        ("correct", "acc|train/accuracy_mean|success_rate|pass@1|solve_rate"),
        ("heldout", "eval/gsm8k/accuracy|test_acc|val/pass@1|valid_score|eval_reward_mean"),
        ("truncated", "truncation_ratio|frac_truncated|completions/truncated_frac"),
        ("zero_signal", "frac_zero_std|zero_advantage_ratio|groups/zero_variance_frac"),
        (
            "",
            "rewards/x/std|reward_weight|kl_coef|entropy_coef|prompt_length_max|"
            "critic/loss|value_loss|eval_runtime|eval_loss|eval/response_length|total_tokens|val/acc/std@32|"
            "train_steps_per_second|loss_scale|clip_ratio/high_max|best_reward|lr_critic",
        ),
    ],
)
def test_names_are_read_by_their_words(metric, names):
    for name in names.split("|"):
        assert list(canonical({name: 0.5})) == ([metric] if metric else []), name


def test_names_that_are_not_known():
    assert guess_reward(["reward", "accuracy"]) == []
    assert guess_reward(["reward_model/ground_truth"]) == []  # verl's data
    assert guess_reward(["accuracy", "reward_format", "loss"]) == ["accuracy"]

    parts = ["reward_brevity", "reward_style", "reward_style_std", "eval_reward_style"]
    assert guess_reward([*parts, "timing_s/reward", "num_rewards", "reward_lr"]) == parts[:2]
    assert suggest_names(["foo", "rewrd_signal", "loss"]) == ["rewrd_signal"]

    # A reward function without a verdict logs NaN, and Trainer's last row the mean loss.
    values = {"rewards/format_a/mean": float("nan"), "rewards/format_b/mean": 0.5}
    assert canonical(values) == {"formatted": 0.5}
    assert canonical({"train_loss": 0.3, "train_runtime": 9.0}) == {}
