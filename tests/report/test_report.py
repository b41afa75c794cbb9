"""The report without a browser: what a page holds, what it escapes, what it rejects."""

import json
import random
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from mesotron import cli
from mesotron.compare.record import write_tournament
from mesotron.config import ReportConfig
from mesotron.report import command, data, read_run, read_runs, render_runs
from mesotron.report.live import is_over
from mesotron.report.page import asset, embed, fingerprint, visible
from mesotron.report.read import Run, read_metrics
from mesotron.report.summary import summarize_run
from mesotron.report.tournament import render_tournament
from mesotron.runs import RunFolder
from mesotron.watch.detectors import ACTION_KEY, Action
from mesotron.watch.log import MAX_ROWS
from support.report_worlds import (
    ATTACK,
    make_event,
    make_row,
    make_run,
    make_sample,
    make_snake,
    make_tournament,
    make_transcript,
)

ROLLBACK = Action(
    step=42,
    action="rollback",
    detector="reward_collapse",
    attempt=1,
    checkpoint=25,
    reason="reward collapse",
    changes=({"field": "optim.lr", "old": 0.1, "new": 0.05},),
).record()


class Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = self.raw = self._inside = ""
        self.feed(html)
        self.data = json.loads(self.raw)
        self.charts = {chart["title"]: chart for chart in self.data["charts"]}

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            if dict(attrs).get("id") == "data":
                self._inside = "data"
            else:
                self._inside = "code"

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data):
        if self._inside == "data":
            self.raw += data
        elif not self._inside:
            self.text += data

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(*paths: Path) -> Page:
    return Page(render_runs(read_runs(paths)))


def write_log(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_state(folder: Path, history: list[dict]) -> None:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


def test_result_charts_bands_and_events(tmp_path):
    page = page_of(make_run(tmp_path / "a", events=[make_event(5), make_event(9, "clear")]).path)
    for fact in ("GRPO with muon at rate 1e-05", "28.0% to 45.0%", "+17.0", "1m 0s on cpu"):
        assert fact in page.text[: page.text.index("Is it learning?")]

    wanted = {
        "Reward",
        "Correct and formatted",
        "Entropy",
        "Groups without signal",
        "Length",
        "Update RMS",
        "Learning rate",
        "my own/metric",
    }

    assert wanted <= set(page.charts)
    reward = page.charts["Reward"]["lines"][0]
    assert reward["high"][0] - reward["y"][0] == pytest.approx(0.4, abs=1e-3)
    assert [mark["step"] for mark in page.data["runs"][0]["marks"]] == [5, 9]
    assert "step 5, warning: entropy collapse" in page.text
    assert len(page.find("figure")) == len(page.data["charts"])


def test_a_gain_is_reported_by_its_interval(tmp_path):
    run = make_run(tmp_path / "a")
    for low, high, verb in ((0.1, 0.2, "improved"), (-0.2, -0.01, "reduced"), (-1, 1, "not")):
        gain = {
            "value": (low + high) / 2,
            "low": low,
            "high": high,
        }
        run.save("result", run.result | {"gain": gain})  # pyright: ignore
        assert verb in summarize_run(read_run(run.path))[0]


def test_the_reward_comes_first_and_what_says_little_is_folded(tmp_path):
    rows = [make_row(k, 20, random.Random(k)) for k in range(1, 21)]
    for row in rows:
        row |= {"optim/muon/dead_blocks": 0.0, "optim/muon/passed_rank": row["reward"]}
        row |= {"learning_rate": 1e-5, "eval/greedy": 0.0}

    path = make_run(tmp_path / "a", rows=rows, events=[make_event(5)]).path
    html = render_runs([read_run(path)])
    titles = re.findall(r'<h2 id="[^"]*">([^<]*)</h2>', html)
    assert titles[:2] == ["Is it learning?", "Watch"]
    assert html.index("<h3>Reward</h3>") < html.index("step 5, warning")

    folds = re.findall(r'<details class="fold"><summary>(.*?)</summary>', html)
    folded = next(title for title in folds if "Dead blocks" in title)
    assert "Learning rate (1e-05 throughout)" in folded
    assert "Directions passed" in folded
    assert not any("Held-out accuracy" in title for title in folds)  # flat, but the question


def test_the_best_evaluation_is_marked(tmp_path):
    rows = [make_row(k, 20, random.Random(k)) for k in range(1, 21)]
    for step, accuracy in ((5, 0.4), (10, 0.8), (15, 0.8), (20, 0.6)):
        rows[step - 1]["eval/greedy"] = accuracy

    run = make_run(tmp_path / "a", rows=rows)
    page = page_of(run.path)
    marks = [mark for mark in page.data["runs"][0]["marks"] if mark["severity"] == "best"]
    assert [mark["step"] for mark in marks] == [10]
    assert "0.8 at step 10" in page.text
    assert "checkpoint-10" not in page.text

    (run.path / "checkpoints" / "checkpoint-10").mkdir(parents=True)
    assert "checkpoint-10" in page_of(run.path).text


def test_the_checkpoint_that_stands_for_the_run_is_marked_instead_of_the_highest(tmp_path):
    rows = [make_row(k, 20, random.Random(k)) for k in range(1, 21)]
    rows[4]["eval/greedy"] = 0.78
    rows[9]["eval/greedy"] = 0.8

    run = make_run(tmp_path / "a", rows=rows)
    for step in (5, 10):
        (run.path / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)

    record = {"step": 5, "score": 0.78, "measure": "accuracy", "problems": 50, "evaluations": 2}
    run.save("best", record)
    page = page_of(run.path)
    marks = [mark for mark in page.data["runs"][0]["marks"] if mark["severity"] == "best"]
    assert [mark["step"] for mark in marks] == [5]
    assert "held-out accuracy" in marks[0]["text"]
    assert "0.78 at step 5" in page.text
    assert "checkpoint-5" in page.text
    assert "checkpoint-10" not in page.text

    run.save("best", {"step": None, "evaluations": 2})  # nothing was kept
    assert read_run(run.path).best.step == 10


def test_a_comparison_says_of_each_run_what_its_own_page_says(tmp_path):
    runs = []
    for name, count in (("long", 60), ("dead", 60), ("short", 4)):
        rows = [make_row(k, 60, random.Random(k)) for k in range(1, count + 1)]
        if name == "dead":
            for row in rows[30:]:
                row["reward"] = 0.01
        runs.append(make_run(tmp_path / name, count, rows=rows).path)

    together = page_of(*runs).text
    for path in runs:
        own = read_run(path)
        assert f"{own.condition}: " in together
        assert f"{own.condition}".capitalize() + f": {own.name}." in together
        assert {"class": f"figure {own.condition}"} in page_of(path).find("div")

    assert {read_run(path).condition for path in runs} == {"healthy", "dead", "unknown"}


def test_the_report_and_the_watch_agree(capsys):
    for name in ("arith", "vote", "rescued"):
        path = Path(__file__).parents[1] / "golden" / "runs" / name
        cli.main(["watch", str(path), "--json"])
        record = json.loads(capsys.readouterr().out)
        diagnosis = read_run(path).diagnosis

        assert diagnosis is not None
        assert diagnosis.cause == record["cause"]
        assert [each.condition for each in diagnosis.phases] == [
            phase["condition"] for phase in record["phases"]
        ]


def test_every_metric_is_drawn_once(tmp_path):
    run = read_run(make_run(tmp_path / "a").path)
    grids = data.make_grids([run])
    charts = [chart for charts in data.make_chapters([run], grids).values() for chart in charts]

    bands = {
        "reward_std",
        "entropy/trajectory_q1",
        "entropy/trajectory_q3",
        "completions/min_length",
        "completions/max_length",
    }

    rest = data.make_rest([run], grids)
    lines = sum(len(chart.lines) for chart in charts)
    assert lines + len(rest) + len(bands) == len(run.columns)
    assert {chart.title for chart in rest} == {"loss", "num_tokens", "my own/metric"}


def test_truncation_is_drawn_once_with_and_without_facts(tmp_path):
    for extra in ({}, {"facts/truncated": 0.5}):
        folder = make_run(tmp_path / f"{len(extra)}")
        row = {
            "reward": 0.5,
            "completions/clipped_ratio": 0.5,
            "completions/repetition": 0.1,
        }

        rows = [{"step": k} | row | extra for k in range(1, 9)]
        write_log(folder.path / "metrics.jsonl", rows)
        chart = page_of(folder.path).charts["Truncated and repetitive"]

        assert sorted(line["name"] for line in chart["lines"]) == ["repeated 4-grams", "truncated"]


def test_page_is_accessible(tmp_path):
    page = page_of(make_run(tmp_path / "a").path)
    plots = [tag for tag in page.find("div") if tag.get("class") == "plot"]
    assert plots

    for plot in plots:
        assert (plot["tabindex"], plot["role"]) == ("0", "img")
        assert str(plot["aria-label"]).startswith("Chart, ")

    assert len(page.find("caption")) >= len(plots)
    headings = [tag for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings.count("h1") == 1
    assert max(int(b[1]) - int(a[1]) for a, b in pairwise(headings)) == 1  # no level is skipped

    labels = {tag["aria-labelledby"] for tag in page.find("section")}
    assert labels == {tag["id"] for tag in page.find("h2")}

    targets = {str(tag["href"])[1:] for tag in page.find("a")}
    assert targets <= {str(attributes.get("id")) for _, attributes in page.tags}


def test_completions_and_unfinished_runs(tmp_path):
    html = render_runs(read_runs([make_run(tmp_path / "a").path]))
    assert html.count("<mark>7</mark>") >= 3
    assert all(part in html for part in ("2 gained", "0 lost", "1 right before and after"))

    first = html.index("\\boxed{<mark>8</mark>}")
    assert html.index("\\boxed{<mark>7</mark>}", first) - first < 600  # side by side

    unfinished = make_run(tmp_path / "unfinished", finished=False)
    assert "step 20 of 20, reward from" in page_of(unfinished.path).text

    run = RunFolder.create(tmp_path / "empty", {"steps": 3}, {"device": "cpu"})
    assert "0 steps, 0 metrics" in page_of(run.path).text


def test_dead_and_rescued_runs(tmp_path):
    rows = [make_row(k, 60, random.Random(k)) for k in range(1, 61)]
    for row in rows[30:]:
        row["reward"] = 0.01

    died = [make_event(34, detector="reward_collapse"), make_event(40, "stop", "reward_collapse")]
    make_run(tmp_path / "dead", 60, rows=rows, events=died)
    make_run(tmp_path / "saved", 60, rows=rows[:30], events=[*died, ROLLBACK])
    dead, saved = read_runs([tmp_path / "dead", tmp_path / "saved"])

    assert (dead.condition, saved.condition) == ("dead", "healthy")
    text = page_of(tmp_path / "dead").text
    assert "Dead since step" in text
    assert "Remedy:" in text

    text = page_of(tmp_path / "saved").text
    assert "step 42, rolled back: reward collapse" in text
    assert "optim.lr" in text


def test_non_finite_numbers_are_listed_and_not_drawn(tmp_path):
    rows = [make_row(k, 9, random.Random(k)) for k in range(1, 10)]
    rows[4]["grad_norm"], rows[6]["grad_norm"] = float("nan"), float("inf")
    page = page_of(make_run(tmp_path / "a", 9, rows=rows).path)
    values = page.charts["Gradient norm"]["lines"][0]["y"]

    assert [k for k, y in enumerate(values) if y is None] == [4, 6]
    assert "step 5, step 7" in page.text


def test_runs_of_snake_and_of_vla(tmp_path):
    page = page_of(make_snake(tmp_path / "s").path)
    assert "30.2 of 35 fruit" in page.text

    chart = page.charts["Fruit per game"]
    assert [height for height, _ in chart["rules"]] == [7.5, 35]  # baselines

    line = chart["lines"][0]
    assert (line["low"][3], line["y"][3], line["high"][3]) == (4, 4.5, 5)  # over its runs

    config = {
        "demos": "demos",
        "policy": {},
        "optim": {"action": "pion", "lr": 0.001},
    }

    run = RunFolder.create(tmp_path / "v", config, {"device": "cpu"})
    for step in (10, 20):
        row = {
            "loss": 1 / step,
            "update_rms/action": 1e-4,
            "gradient/action/snr": 0.5,
        }
        run.append("metrics", {"step": step, **row})

    assert "20 steps, loss from 0.1 to 0.05" in page_of(run.path).text
    result = {
        "success": 0.9,
        "wrong instruction": 0.1,
        "expert": 1.0,
    }

    run.finish(
        {
            "steps": 20,
            "loss": 0.05,
            **result,
        },
        lambda: "words",
    )

    page = page_of(run.path)
    assert "90.0% success, 10.0% with a wrong instruction" in page.text
    assert list(page.charts) == ["Loss", "Update RMS", "Gradient signal-to-noise ratio"]

    for step in (30, 40, 50, 60):
        run.append("metrics", {"step": step, "loss": float("nan")})
    event = {
        "step": 30,
        "detector": "nonfinite",
        "severity": "stop",
        "diagnosis": "a loss is NaN",
    }

    run.append(
        "events",
        {
            **event,
            "evidence": [],
            "remedy": "",
            "began": 30,
        },
    )

    assert {"class": "figure dead"} in page_of(run.path).find("div")


def test_foreign_names_get_our_charts(tmp_path):
    names = {
        "train/rewards_avg": "Reward",
        "train/loss": "",
        "response_length/mean": "Length",
        "train/critic/score/max": "",
        "val/gsm8k/acc": "Held-out accuracy",
        "actor/entropy": "Entropy",
        "train/my_thing": "my_thing",
    }

    rows = [
        {"train/global_step": k} | dict.fromkeys(names, 0.7 if k < 40 else 0.02)
        for k in range(1, 90)
    ]

    log = write_log(tmp_path / "log.jsonl", rows)
    page = page_of(log)
    assert {name for name in names.values() if name} <= set(page.charts)
    assert next(iter(page.charts)) == "Reward"
    assert any(mark["severity"] == "stop" for mark in page.data["runs"][0]["marks"])
    assert "reward collapse" in page.text
    assert {"class": "figure dead"} in page.find("div")

    log.write_text(log.read_text().replace("train/rewards_avg", "prize"))
    assert "Reward" not in page_of(log).charts

    command.run(ReportConfig(paths=(log,), rename=("reward=prize",)))
    assert next(iter(Page((tmp_path / "report.html").read_text()).charts)) == "Reward"


def test_the_page_says_what_the_watch_says(tmp_path):
    rows = [
        {"step": k, "loss": 0.1}
        | ({"eval/accuracy": 0.6 + k / 1e4 if k < 60 else 0.05} if k % 5 == 0 else {})
        for k in range(120)
    ]
    for condition, shown in (("dead", rows), ("unknown", rows[:4]), ("healthy", rows[:60])):
        page = page_of(write_log(tmp_path / "log.jsonl", shown))
        assert {"class": f"figure {condition}"} in page.find("div")
        assert ("no problems" in page.text.lower()) == (condition == "healthy")

    fallen = [{"step": k, "reward": 0.7 if k < 32 else 0.02} for k in range(43)]
    again = [{"step": k, "reward": 0.7 + k / 1e4} for k in range(26, 90)]
    write_state(tmp_path / "undone", [*fallen, {"step": 42, ACTION_KEY: ROLLBACK}, *again])
    page = page_of(tmp_path / "undone")

    assert {"class": "figure healthy"} in page.find("div")
    assert "rolled back" in page.text.lower()
    assert "after a rollback" in page.text
    assert "no problems" not in page.text.lower()


def test_an_output_folder_of_trl_is_one_run(tmp_path):
    outputs = tmp_path / "outputs"
    for step in (10, 20, 30):
        history = [{"step": k, "reward": 0.5} for k in range(step)]
        write_state(outputs / f"checkpoint-{step}", history)
        (outputs / f"checkpoint-{step}" / "config.json").write_text("{}")  # the model's

    assert command.find([outputs]) == [outputs]
    assert len(read_run(outputs).rows) == 30

    (outputs / "config.json").write_text("{}")
    assert command.find([outputs]) == [outputs]
    assert len(command.find([outputs, *outputs.glob("c*-?0")])) == 4


def test_the_page_of_a_checkpoint_goes_to_its_run(tmp_path):
    path = tmp_path / "run" / "checkpoints" / "checkpoint-2"
    write_state(path, [{"step": 1, "reward": 0.5}])
    assert command.run(ReportConfig(paths=(path,))) == 0
    assert (tmp_path / "run" / "report.html").is_file()
    assert [one.name for one in path.iterdir()] == ["trainer_state.json"]


def test_several_runs_share_charts(tmp_path):
    paths = [make_run(tmp_path / f"seed-{seed}", seed=seed).path for seed in range(3)]
    page = page_of(*paths)
    assert {"Correct", "Formatted", "Correct but unformatted"} <= set(page.charts)
    assert len({(x["color"], x["dash"]) for x in page.charts["Reward"]["lines"]}) == 3
    assert "the best held-out accuracy is 45.0%" in page.text
    assert len([tag for tag in page.find("button") if "data-run" in tag]) == 3
    assert "Settings that differ" in page.text  # the seed

    make_snake(tmp_path / "s")  # another kind of score
    text = page_of(tmp_path / "seed-0", tmp_path / "s").text
    assert "the best" not in text
    assert "greedy fruit 30.25" in text


def test_the_untrained_start_is_drawn_if_runs_share_it(tmp_path):
    for k, start in enumerate((0.25, 0.25, 0.5)):
        rows = [
            {
                "step": step,
                "reward": 0.5,
                "eval/greedy": 0.6,
            }
            for step in range(1, 9)
        ]

        run = make_run(tmp_path / str(k), 8, rows=rows)
        run.save("before", {"greedy": {"strict": {"value": start}}, "transcripts": []})

    def rules(*names: str) -> list:
        charts = page_of(*(tmp_path / name for name in names)).data["charts"]
        return next(c["rules"] for c in charts if c["title"].startswith("Held-out accuracy"))

    assert rules("0") == rules("0", "1") == [[0.25, "before training"]]
    assert rules("0", "2") == []


def test_twenty_long_runs_fit_the_page():
    names = [name for plots in data.CATALOG.values() for plot in plots for name in plot.lines]
    names = [name.replace("*", "muon") for name in names] + [f"other/{k}" for k in range(45)]
    noise = random.Random(0)
    columns = {name: [noise.gauss(0, 1) for _ in range(400)] for name in names}
    rows = [{"step": step} for step in range(1, 401)]

    runs = [Run(f"run {k}", Path(), rows) for k in range(20)]
    for run in runs:
        run.__dict__.update(columns=columns, diagnosis=None)

    html = render_runs(runs)
    assert 400_000 < len(html.encode()) < 1_500_000
    assert 400_000 < len(render_runs(runs[:4]).encode()) < 1_000_000

    charts = Page(html).data["charts"]
    assert min(len(line["y"]) for chart in charts for line in chart["lines"]) >= data.FEWEST_POINTS


def test_the_page_of_a_run_is_small():
    runs = Path(__file__).parents[1] / "golden" / "runs"
    for name in ("arith", "vote", "rescued"):
        assert len(render_runs([read_run(runs / name)]).encode()) < 250_000


def test_a_spike_of_one_step_survives_the_reduction(tmp_path):
    rows = [make_row(k, 900, random.Random(k)) for k in range(1, 901)]
    rows[333]["grad_norm"] = 99.0
    page = page_of(make_run(tmp_path / "a", 900, rows=rows).path)
    line = page.charts["Gradient norm"]["lines"][0]

    assert len(line["y"]) == data.MOST_POINTS
    assert all(a <= y <= b for a, y, b in zip(line["low"], line["y"], line["high"], strict=True))
    assert max(line["high"]) == 99
    assert max(line["low"]) < 10

    buckets = data.Buckets.split(1000, 100)
    assert max(buckets.reduce([9.0 * (k == 333) for k in range(1000)])) == pytest.approx(0.9)

    middles = buckets.middles([float(k) for k in range(1000)])
    assert (middles[0], middles[-1]) == (0, 999)


def test_model_output_never_becomes_markup(tmp_path):
    run = make_run(
        tmp_path / "a",
        samples=[make_sample(1, ATTACK)],
        events=[make_event(5, ATTACK, ATTACK)],
        rows=[
            {
                "step": k,
                "reward": 0.1,
                ATTACK: 1.0,
            }
            for k in range(1, 9)
        ],
    )

    run.save("before", {"transcripts": [make_transcript(0, False, completion=ATTACK, gold=ATTACK)]})
    run.save("after", {"transcripts": [make_transcript(0, False, question=ATTACK)]})
    run.save("config", run.config | {ATTACK: ATTACK})
    other = make_run(tmp_path / ATTACK[:9].replace("/", "_")).path
    clean = [make_run(tmp_path / name, events=[make_event(5)]).path for name in ("b", "c")]

    known = {tag for page in (page_of(*clean), page_of(clean[0])) for tag, _ in page.tags}
    for html in (render_runs(read_runs([run.path, other])), render_runs(read_runs([run.path]))):
        page = Page(html)
        assert {tag for tag, _ in page.tags} <= known

        attributes = {name for _, found in page.tags for name in found}
        assert not any(name.startswith("on") for name in attributes)
        assert {"src", "style"}.isdisjoint(attributes)
        assert all(str(tag["href"]).startswith("#") for tag in page.find("a"))
        assert len(page.find("script")) == html.count("</script>") == 2

        for invisible in "\u2028\u2029\u202e\u2066\x00\x1b\ud800":
            assert invisible not in html

        assert "⟨U+202E⟩esrever" in html  # shown
        html.encode()  # no lone surrogate is left


def test_text_and_json_are_made_safe():
    assert visible("a\tb\nc é 漢 🙂\u200b") == "a\tb\nc é 漢 🙂⟨U+200B⟩"
    held = embed({"k</script>": [ATTACK, 1.0, float("inf"), None, True, 100_123.0, 0.123456]})
    assert held.isascii()
    assert "<" not in held

    values = [visible(ATTACK), 1, None, None, True, 100_123, 0.1235]
    assert json.loads(held) == {"k</script>": values}


def test_the_policy_allows_one_script_and_no_request(tmp_path):
    html = render_runs(read_runs([make_run(tmp_path / "a").path]))
    metas = [tag for tag in Page(html).find("meta") if tag.get("http-equiv")]
    (policy,) = [str(tag["content"]) for tag in metas]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    script = asset("chart.js") + asset("page.js")
    style = asset("page.css")

    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == fingerprint(script)
    assert rules["style-src"] == fingerprint(style)
    assert f"<style>{style}</style>" in html
    assert f"<script>{script}</script>" in html
    assert "</script" not in script

    for text in (script, style, html):
        text = text.replace("http://www.w3.org/2000/svg", "").replace("url(#clip", "")
        assert not re.search(r"https?://|url\(|@import|fetch\(", text)


def test_the_command_finds_runs(tmp_path, capsys):
    def report(path: Path, **more) -> None:
        assert command.run(ReportConfig(paths=(path,), **more)) == 0

    runs = tmp_path / "runs"
    for name in ("a", "b"):
        make_run(runs / name)

    report(runs / "a")
    whole = (runs / "a" / "report.html").read_text()
    report(runs / "a" / "metrics.jsonl")

    assert (runs / "a" / "report.html").read_text() == whole  # its own log stands for the run
    report(runs)  # both, not the link to b
    page = Page((runs / "report.html").read_text())

    assert [run["name"] for run in page.data["runs"]] == ["a", "b"]
    report(runs / "a", out=tmp_path / "new" / "page.html")
    assert str(tmp_path / "new" / "page.html") in capsys.readouterr().out


def test_bad_input_is_rejected(tmp_path):
    make_run(tmp_path / "a")
    make_tournament(tmp_path / "t")

    many = [tmp_path / f"run-{k}" for k in range(command.MOST_RUNS + 1)]
    for path in many:
        RunFolder.create(path, {}, {})

    def reject(paths: list[Path], match: str, **more) -> None:
        with pytest.raises(ValueError, match=match):
            command.run(ReportConfig(paths=tuple(paths), **more))

    reject([tmp_path / "a", tmp_path / "t"], "tournament")
    reject(many, "29 runs")
    reject([tmp_path / "nothing"], "nothing")
    data = write_log(tmp_path / "data.jsonl", [{"question": "2 + 3?", "answer": 5}])
    reject([data], "answer")

    assert not (tmp_path / "report.html").exists()
    reject([tmp_path / "a", tmp_path / "a"], "twice")
    (tmp_path / "t" / "tournament.json").write_text("{")
    reject([tmp_path / "t"], "tournament.json")
    (tmp_path / "a" / "metrics.jsonl").write_text("{}\nno\n{}\n")
    reject([tmp_path / "a"], "metrics.jsonl")
    (tmp_path / "b").symlink_to(tmp_path / "c")
    (tmp_path / "c").symlink_to(tmp_path / "b")

    assert cli.main(["report", str(tmp_path / "b")]) == 2


def test_incomplete_files_of_a_run_leave_a_page(tmp_path):
    rows = [{"step": 1, "reward": 0.5}, {"step": 2, "entropy": 1.0}, {"reward": 1.0}, {"step": 3}]
    watch = {
        "step": 3,
        "kind": "watch",
        "detector": "nonfinite",
    }

    guard = {"step": 3, "kind": "guard", "action": "rollback"}
    acted = guard | {
        "detector": "x",
        "attempt": 1,
        "reason": "",
        "changes": [{"field": "lr"}],
    }

    events = [
        {"step": 3},
        watch | {"severity": "stop"},
        watch | {"evidence": [{"metric": "loss"}]},
        watch | {"evidence": 7},
        guard,
        acted,
    ]

    run = make_run(tmp_path / "a", rows=rows, events=events)
    run.append("spectra", {"step": 1, "block": "w"})
    run.save("routing", {"rows": [{"name": "w"}]})

    assert "Reward" in page_of(run.path).text
    (run.path / "after.json").write_text('{"transcripts": [{"id": 1}]}')
    assert cli.main(["report", str(run.path)]) == 2


def test_tournament_page(tmp_path):
    record = make_tournament(tmp_path / "t")
    page = Page(render_tournament(tmp_path / "t"))
    order = [page.text.index(f"{k}. {name}") for k, name in enumerate(("pion", "muon", "adamw"), 1)]

    assert order == sorted(order)
    for fact in (
        "0.100 †",
        "0.500*",
        "out of memory </script>",
        "reward reaches 0.4",
        "[0.510, 0.590]",
        "highest tried",
    ):
        assert fact in page.text, fact

    assert len(page.charts["Reward"]["lines"]) == 6  # two seeds of three contenders
    rates = page.charts["Greedy accuracy over learning rate"]
    assert rates["logX"]

    crossed = next(line for line in rates["lines"] if line.get("dots") == "crosses")
    assert (crossed["x"], crossed["y"]) == ([0.0016], [0.1])
    assert len(record.contenders) == len([t for t in page.find("button") if "data-run" in t])

    left = next(cell for cell in record.cells if cell.stage == "final")
    left.rate *= 4  # a rate that a longer search gave up
    write_tournament(tmp_path / "t", record)

    assert len(Page(render_tournament(tmp_path / "t")).charts["Reward"]["lines"]) == 5


def test_unfinished_and_scoreless_tournaments(tmp_path):
    record = make_tournament(tmp_path / "t")
    assert is_over(tmp_path / "t")

    for row in record.standings:
        row.score = row.low = row.high = row.behind = row.p_holm = None

    write_tournament(tmp_path / "t", record)
    ranking = Page(render_tournament(tmp_path / "t")).text.partition("p (Holm)")[2]
    assert "best" not in ranking.partition("Learning curves")[0]

    record.standings = []
    record.words = ["No contender has a score."]
    write_tournament(tmp_path / "t", record)

    assert is_over(tmp_path / "t")
    record.words = []
    record.threshold = None
    record.cells = record.cells[:3]
    record.cells[1].state, record.cells[1].score, record.cells[1].verdict = "running", None, None
    record.cells[2].state, record.cells[2].run = "waiting", ""
    write_tournament(tmp_path / "t", record)

    assert not is_over(tmp_path / "t")
    assert "1 of 3 cells" in Page(render_tournament(tmp_path / "t", live=5)).text


def test_a_long_run_is_drawn_by_the_rows_that_the_watch_reads(tmp_path):
    count = MAX_ROWS + 1000
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(count):
            file.write(json.dumps({"step": step, "reward": step % 7 / 7}) + "\n")

    rows = read_metrics(RunFolder(tmp_path))
    assert len(rows) < MAX_ROWS
    assert [row["step"] for row in rows[-500:]] == [*range(count - 500, count)]
