"""The studies have the runs that PROTOCOL.md names."""

from argparse import Namespace
from collections import defaultdict

from benchmarks.claims.__main__ import (
    RATES,
    box_cells,
    collapse_cells,
    collapsed,
    print_rates,
    rates_cells,
)


def test_every_pair_of_rewards_has_the_same_flags_and_seeds():
    given = Namespace(model="tiny")
    for cells, count, num_seeds in ((box_cells, 24, 3), (collapse_cells, 20, 5)):
        flags = {(cell.name, cell.seed): " ".join(cell.flags) for cell in cells(given)}
        assert len(flags) == count
        assert len({seed for _, seed in flags}) == num_seeds
        assert {name.split()[0] for name, _ in flags} == set(RATES)

        for (name, seed), own in flags.items():
            other = flags[name.replace("sparse", "two_part"), seed]
            assert other == own.replace("--reward sparse", "--reward two_part")


def test_rates_are_the_same_for_adamw_and_muon():
    cells = list(rates_cells(Namespace()))
    assert len(cells) == 78

    rates = defaultdict(set)
    for cell in cells:
        optim, rate = cell.name.split()
        rates[optim].add(float(rate))
    assert rates["muon"] - rates["adamw"] == {1e-6, 0.016, 0.032}


def test_a_rate_is_safe_below_the_first_collapse(capsys):
    def run(name, end):
        curve = [[0, 0.3], [9, end]]
        return {"name": name, "seed": 200, "accuracy": end, "mean": 0.5, "curve": curve}

    runs = [
        run("adamw 1", 0.5),
        run("adamw 2", 0.6),
        run("adamw 4", 0.1),
        run("adamw 8", 0.6),
        run("muon 1", 0.7),
        run("pion 1", 1.0),
    ]
    assert [run["name"] for run in runs if collapsed(run)] == ["adamw 4"]
    print_rates(runs)
    assert "adamw: best 2, highest safe 2, margin 1" in capsys.readouterr().out
