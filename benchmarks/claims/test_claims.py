"""The studies have the runs that PROTOCOL.md names."""

from argparse import Namespace

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
    for cells, count, seeds in ((box_cells, 24, 3), (collapse_cells, 20, 5)):
        made = {(name, seed): flags for name, seed, flags in cells(given)}
        assert (len(made), len({seed for _, seed in made})) == (count, seeds)
        assert {name.split()[0] for name, _ in made} == set(RATES)

        for (name, seed), flags in made.items():
            other = made[name.replace("sparse", "two_part"), seed]
            assert other == ["two_part" if word == "sparse" else word for word in flags]


def test_rates_are_the_same_for_adamw_and_muon():
    made = [name.split() for name, _, _ in rates_cells(Namespace())]
    by = {optim: {float(rate) for o, rate in made if o == optim} for optim in ("adamw", "muon")}
    assert (len(made), by["muon"] - by["adamw"]) == (78, {1e-6, 0.016, 0.032})


def test_a_rate_is_safe_below_the_first_collapse(capsys):
    ends = {
        "adamw 1": 0.5,
        "adamw 2": 0.6,
        "adamw 4": 0.1,
        "adamw 8": 0.6,
        "muon 1": 0.7,
        "pion 1": 1,
    }

    runs = [
        {
            "name": name,
            "seed": 200,
            "accuracy": end,
            "mean": 0.5,
            "curve": [[0, 0.3], [9, end]],
        }
        for name, end in ends.items()
    ]

    assert [run["name"] for run in runs if collapsed(run)] == ["adamw 4"]
    print_rates(runs)
    assert "adamw: best 2, highest safe 2, margin 1" in capsys.readouterr().out
