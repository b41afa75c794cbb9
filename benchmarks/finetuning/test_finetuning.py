"""The plan of the study: searches first, then the chosen rate on other seeds."""

from argparse import Namespace

from benchmarks.finetuning.plan import (
    CONTENDERS,
    FINAL_SEEDS,
    RATES,
    TUNING_SEEDS,
    key_of,
    plan,
)


def test_finals_follow_a_finished_search_at_its_best_rate():
    given = Namespace(parts=["supervised"])
    done = {}
    for cell in plan(given, {}):
        assert cell["seed"] in TUNING_SEEDS
        loss = abs(cell["rate"] - RATES[3])
        done[key_of(cell)] = cell | {"loss": loss if cell["rate"] > RATES[2] else float("nan")}

    finals = [cell for cell in plan(given, done) if cell["seed"] in FINAL_SEEDS]
    assert len(finals) == len(CONTENDERS) * len(FINAL_SEEDS)
    assert {cell["rate"] for cell in finals} == {RATES[3]}


def test_curves_share_their_cells_with_the_comparison():
    given = Namespace(
        parts=["rates"],
        ranks=[4, 16],
        first=0,
        last=10,
        only=[],
    )

    keys = [key_of(cell) for cell in plan(given, {})]
    assert len(keys) == len(set(keys)) == 8 * len(RATES) * len(TUNING_SEEDS)

    both = {key_of(cell) for cell in plan(Namespace(parts=["supervised"]), {})}
    assert {key for key in both if key.startswith("lora product/16/")} <= set(keys)
