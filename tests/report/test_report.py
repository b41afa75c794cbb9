"""The report without a browser: what a page holds, what it escapes, and what it refuses."""

import json
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from mesotron.compare.record import write_tournament
from mesotron.config import ReportConfig
from mesotron.report import command, read_run, read_runs, render_runs
from mesotron.report.catalogue import CHAPTERS
from mesotron.report.charts import FEWEST_POINTS, MOST_POINTS, make_chapters, make_grids, make_rest
from mesotron.report.markup import el, embed, escape, visible
from mesotron.report.page import fingerprint, script, style
from mesotron.report.read import Run, short_names
from mesotron.report.series import make_buckets
from mesotron.report.tournament import render_tournament
from mesotron.runs import RunFolder
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

DOCS = Path(__file__).parents[2] / "docs"


class Page(HTMLParser):
    """A page taken apart as a browser takes it: elements, text outside scripts, the data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = "data" if dict(attrs).get("id") == "data" else "code"

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data):
        if self._inside == "data":
            self.data += data
        elif not self._inside:
            self.text += data

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(*paths: Path) -> Page:
    return Page(render_runs(read_runs(paths)))


# ---- one run ----


def test_a_page_opens_with_what_happened(tmp_path):
    make_run(tmp_path / "a")
    text = page_of(tmp_path / "a").text
    assert "GRPO with muon at rate 1e-05 took held-out accuracy from 28.0% to 45.0%" in text
    assert "gain +17.0 points, 95 % interval +10.0 to +24.0" in text
    assert "It took 1m 0s on cpu, 80 thousand tokens." in text
    assert text.index("took held-out") < text.index("Is it learning?")


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        ({"value": -0.1, "low": -0.2, "high": -0.01}, "lost held-out accuracy, from"),
        ({"value": 0.01, "low": -0.1, "high": 0.1}, "by no more than 4 problems can tell"),
    ],
)
def test_a_gain_is_called_one_only_if_it_is(tmp_path, gain, said):
    run = make_run(tmp_path / "a")
    assert run.result is not None
    run.save("result", run.result | {"gain": gain})
    text = page_of(tmp_path / "a").text
    assert said in text
    assert "took held-out" not in text


def test_every_chart_of_the_issue_is_there(tmp_path):
    make_run(tmp_path / "a", events=[make_event(5), make_event(9, "clear")])
    page = page_of(tmp_path / "a")
    data = json.loads(page.data)
    titles = [chart["title"] for chart in data["charts"]]
    wanted = ["Reward", "Correct, and in the format", "Entropy", "Groups without a signal",
              "Length", "Update RMS", "Learning rate"]  # fmt: skip
    assert set(wanted) <= set(titles)
    assert "my own/metric" in titles  # what nobody knows is drawn too
    reward = data["charts"][titles.index("Reward")]["lines"][0]
    assert reward["high"][0] - reward["y"][0] == pytest.approx(0.4, abs=1e-3)  # its band
    assert [mark["step"] for mark in data["runs"][0]["marks"]] == [5, 9]
    assert "step 5, warning: entropy collapse" in page.text
    assert len(page.find("figure")) == len(data["charts"])


def test_each_chart_has_a_name_a_table_and_a_place_in_the_tab_order(tmp_path):
    make_run(tmp_path / "a")
    page = page_of(tmp_path / "a")
    plots = [tag for tag in page.find("div") if tag.get("class") == "plot"]
    assert plots
    for plot in plots:
        assert plot["tabindex"] == "0"
        assert plot["role"] == "img"
        assert str(plot["aria-label"]).startswith("Chart, ")
    assert len(page.find("caption")) >= len(plots)
    headings = [tag for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings.count("h1") == 1
    deeper = [int(b[1]) - int(a[1]) for a, b in pairwise(headings)]
    assert max(deeper) == 1  # no level is skipped
    labels = {tag["aria-labelledby"] for tag in page.find("section")}
    assert labels == {tag["id"] for tag in page.find("h2")}
    targets = {str(tag["href"])[1:] for tag in page.find("a")}
    assert targets <= {str(attributes.get("id")) for _, attributes in page.tags}


def test_transcripts_stand_side_by_side_with_their_answers_marked(tmp_path):
    make_run(tmp_path / "a")
    html = render_runs(read_runs([tmp_path / "a"]))
    assert html.count("<mark>7</mark>") >= 3
    assert "wrong to right" in html
    assert "Of 4 held-out problems 1 were right before and after, 2 were gained and 0 lost." in html
    first = html.index("\\boxed{<mark>8</mark>}")
    assert html.index("\\boxed{<mark>7</mark>}", first) - first < 600  # before, then after


def test_a_run_that_goes_on_says_so(tmp_path):
    make_run(tmp_path / "a", finished=False)
    text = page_of(tmp_path / "a").text
    assert "20 of 20 steps so far, reward from" in text
    assert "So far it has taken 1m 0s on cpu" in text


def test_a_run_that_has_written_nothing_yet_has_a_page(tmp_path):
    run = RunFolder.create(tmp_path / "a", {"steps": 3}, {"device": "cpu"})
    text = page_of(run.path).text
    assert "A run of 0 steps and 0 metrics." in text


def test_a_dead_run_is_called_dead_and_a_rescued_one_is_not(tmp_path):
    rows = [make_row(k, 60, random.Random(k)) for k in range(1, 61)]
    for row in rows[30:]:
        row["reward"] = 0.01
    rollback = {"step": 42, "action": "rollback", "detector": "reward_collapse", "attempt": 1,
                "checkpoint": 25, "changes": [{"field": "optim.lr", "old": 0.1, "new": 0.05}],
                "refused": [], "reason": "reward collapse", "evidence": [],
                "kind": "guard"}  # fmt: skip
    died = [make_event(34, detector="reward_collapse"), make_event(40, "stop", "reward_collapse")]
    make_run(tmp_path / "dead", 60, rows=rows, events=died)
    make_run(tmp_path / "saved", 60, rows=rows[:30], events=[*died, rollback])
    dead, saved = read_runs([tmp_path / "dead", tmp_path / "saved"])
    assert (dead.condition, saved.condition) == ("dead", "healthy")
    text = page_of(tmp_path / "dead").text
    assert "The watch calls it dead at step" in text
    assert "reward collapse" in text
    assert "What to do:" in text
    text = page_of(tmp_path / "saved").text
    assert "step 42, gone back: reward collapse" in text
    assert "optim.lr 0.1 to 0.05" in text


def test_numbers_that_are_not_finite_are_told_and_not_drawn(tmp_path):
    rows = [make_row(k, 9, random.Random(k)) for k in range(1, 10)]
    rows[4]["grad_norm"] = float("nan")
    rows[6]["grad_norm"] = float("inf")
    make_run(tmp_path / "a", 9, rows=rows)
    page = page_of(tmp_path / "a")
    chart = next(c for c in json.loads(page.data)["charts"] if c["title"] == "Gradient norm")
    assert [k for k, y in enumerate(chart["lines"][0]["y"]) if y is None] == [4, 6]
    assert "step 5, step 7" in page.text


# ---- other kinds of runs ----


def test_snake_is_drawn_beside_random_players_with_a_band_over_its_runs(tmp_path):
    make_snake(tmp_path / "s")
    page = page_of(tmp_path / "s")
    assert "eats 30.2 fruit of 35 when it plays greedily, where random legal moves" in page.text
    chart = next(c for c in json.loads(page.data)["charts"] if c["title"] == "Fruit in a game")
    assert chart["rules"] == [[7.5, "random legal moves"], [35, "a full board"]]
    line = chart["lines"][0]
    assert (line["low"][3], line["y"][3], line["high"][3]) == (4, 4.5, 5)


def test_vla_runs_tell_success_beside_its_controls(tmp_path):
    config = {"demos": "demos", "policy": {}, "optim": {"action": "pion", "lr": 0.001}}
    run = RunFolder.create(tmp_path / "v", config, {"device": "cpu"})
    for step in (10, 20):
        row = {"loss": 1 / step, "update_rms/action": 1e-4, "gradient/action/snr": 0.5}
        run.append("metrics", {"step": step, **row})
    assert "at rate 0.001, 20 steps, loss from 0.1 to 0.05." in page_of(run.path).text
    found = {"success": 0.9, "wrong instruction": 0.1, "expert": 1.0}
    run.finish({"steps": 20, "loss": 0.05, **found}, "words")
    page = page_of(run.path)
    assert "succeeds in 90.0% of the episodes, and 10.0% when told a wrong instr" in page.text
    titles = [chart["title"] for chart in json.loads(page.data)["charts"]]
    assert titles == ["Loss", "Update RMS", "Signal to noise of the gradient"]


def test_anybodys_log_is_drawn_with_what_the_watch_sees_in_it(tmp_path):
    log = tmp_path / "trainer_state.json"
    history = [{"step": k, "reward": 0.7 if k < 40 else 0.02, "kl": 0.1} for k in range(1, 90)]
    log.write_text(json.dumps({"log_history": history}))
    page = page_of(log)
    assert json.loads(page.data)["charts"][0]["title"] == "Reward"
    assert json.loads(page.data)["runs"][0]["marks"]  # the collapse
    assert "reward collapse" in page.text


# ---- several runs ----


def test_runs_over_one_another_have_a_chart_for_each_metric(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"seed-{seed}", seed=seed)
    page = page_of(*(tmp_path / f"seed-{seed}" for seed in range(3)))
    charts = json.loads(page.data)["charts"]
    titles = [chart["title"] for chart in charts]
    assert {"Correct", "In the format", "Right outside the format"} <= set(titles)
    styles = {(line["colour"], line["dash"]) for line in charts[0]["lines"]}
    assert len(styles) == 3
    assert "Three runs side by side: the best held-out accuracy is 45.0%" in page.text
    chips = [tag for tag in page.find("button") if "data-run" in tag]
    assert len(chips) == 3
    assert "Where their settings differ" in page.text  # the seed


def test_held_out_accuracy_stands_beside_the_start_that_runs_share(tmp_path):
    for k, start in enumerate((0.25, 0.25, 0.5)):
        rows = [{"step": step, "reward": 0.5, "eval/greedy": 0.6} for step in range(1, 9)]
        run = make_run(tmp_path / str(k), 8, rows=rows)
        before = {"greedy": {"strict": {"value": start}}, "transcripts": []}
        run.save("before", before)

    def rules(*names: str) -> list:
        charts = json.loads(page_of(*(tmp_path / name for name in names)).data)["charts"]
        return next(c["rules"] for c in charts if c["title"].startswith("Held-out accuracy"))

    assert rules("0") == rules("0", "1") == [[0.25, "before training"]]
    assert rules("0", "2") == []


def test_scores_of_different_kinds_are_not_ranked(tmp_path):
    make_run(tmp_path / "a")
    make_snake(tmp_path / "s")
    text = page_of(tmp_path / "a", tmp_path / "s").text
    assert "Two runs side by side. The watch found nothing wrong." in text
    assert "greedy fruit 30.25" in text


def test_lines_of_28_runs_differ_in_colour_or_dash():
    assert len({(k % 7, k % 4) for k in range(command.MOST_RUNS)}) == command.MOST_RUNS


def test_names_are_as_short_as_they_can_be(tmp_path):
    paths = [tmp_path / "x" / "run", tmp_path / "y" / "run"]
    assert short_names(paths) == ["x/run", "y/run"]
    with pytest.raises(ValueError, match="named twice"):
        short_names([tmp_path, tmp_path])


def test_twenty_long_runs_stay_below_three_megabytes():
    """The issue's bound, with as many metrics as `mesotron train` logs."""
    names = [name for chapter in CHAPTERS for plot in chapter.plots for name in plot.lines]
    names = [name.replace("*", "muon") for name in names] + [f"other/{k}" for k in range(45)]
    noise = random.Random(0)
    columns = {name: [noise.gauss(0, 1) for _ in range(2000)] for name in names}
    rows = [{"step": step} for step in range(1, 2001)]
    empty = {"environment": {}, "written": [], "samples": [], "routing": [], "spectra": []}
    empty |= {"result": None, "before": None, "after": None, "by_run": [], "config": {}}
    runs = [Run(name=f"run {k}", path=Path(), rows=rows, **empty) for k in range(20)]
    for run in runs:  # made once: to read them is not what is measured here
        run.__dict__.update(columns=columns, story=None)
    page = render_runs(runs)
    assert 400_000 < len(page.encode()) < 3_000_000
    charts = json.loads(Page(page).data)["charts"]
    assert min(len(line["y"]) for chart in charts for line in chart["lines"]) >= FEWEST_POINTS


# ---- reduction ----


def test_a_spike_of_one_step_survives_the_reduction():
    column = [0.0] * 1000
    column[333] = 9.0
    buckets = make_buckets(1000, 100)
    assert max(buckets.highs(column)) == 9.0
    assert max(buckets.means(column)) == pytest.approx(0.9)
    assert buckets.middles([float(k) for k in range(1000)])[0] == 0.0
    assert buckets.middles([float(k) for k in range(1000)])[-1] == 999.0


def test_a_long_run_has_bands_and_says_only_of_its_own_what_they_are(tmp_path):
    rows = [make_row(k, 900, random.Random(k)) for k in range(1, 901)]
    make_run(tmp_path / "a", 900, rows=rows)
    page = page_of(tmp_path / "a")
    charts = {chart["title"]: chart for chart in json.loads(page.data)["charts"]}
    line = charts["Gradient norm"]["lines"][0]
    assert len(line["y"]) == MOST_POINTS
    assert all(a <= y <= b for a, y, b in zip(line["low"], line["y"], line["high"], strict=True))
    assert max(line["high"]) == pytest.approx(max(row["grad_norm"] for row in rows), rel=1e-3)
    assert "the band is one standard deviation" in page.text
    assert "the range over runs" not in page.text


def test_every_metric_is_drawn_once(tmp_path):
    make_run(tmp_path / "a")
    run = read_run(tmp_path / "a")
    grids = make_grids([run])
    chapters = make_chapters([run], grids)
    lines = sum(len(chart.lines) for _, charts in chapters for chart in charts)
    bands = {"reward_std", "entropy/trajectory_q1", "entropy/trajectory_q3",
             "completions/min_length", "completions/max_length"}  # fmt: skip
    rest = make_rest([run], grids)
    assert lines + len(rest) + len(bands) == len(run.columns)
    assert {chart.title for chart in rest} == {"loss", "num_tokens", "my own/metric"}


# ---- what a model can say ----


def test_nothing_that_was_said_becomes_markup(tmp_path):
    run = make_run(
        tmp_path / "a",
        samples=[make_sample(1, ATTACK)],
        events=[make_event(5, ATTACK, ATTACK)],
        rows=[{"step": k, "reward": 0.1, ATTACK: 1.0} for k in range(1, 9)],
    )
    run.save("before", {"transcripts": [make_transcript(0, False, completion=ATTACK, gold=ATTACK)]})
    run.save("after", {"transcripts": [make_transcript(0, False, question=ATTACK)]})
    run.save("config", run.config | {ATTACK: ATTACK})
    html = render_runs(
        read_runs([run.path, make_run(tmp_path / ATTACK[:9].replace("/", "_")).path])
    )
    clean = [make_run(tmp_path / name, events=[make_event(5)]).path for name in ("b", "c")]
    known = {tag for page in (page_of(*clean), page_of(clean[0])) for tag, _ in page.tags}
    for text in (html, render_runs(read_runs([run.path]))):
        page = Page(text)
        assert {tag for tag, _ in page.tags} <= known
        attributes = {name for _, found in page.tags for name in found}
        assert not any(name.startswith("on") for name in attributes)
        assert {"src", "style"}.isdisjoint(attributes)
        assert all(str(tag["href"]).startswith("#") for tag in page.find("a"))
        assert len(page.find("script")) == 2
        assert text.count("</script>") == 2
        for unseen in "\u2028\u2029\u202e\u2066\x00\x1b\ud800":
            assert unseen not in text
        assert "⟨U+202E⟩esrever" in text  # shown
        text.encode()  # half of a surrogate pair would not be


def test_escaping_is_for_text_and_for_attributes():
    assert el("p", '<b>"&', title="\"'><b>") == (
        '<p title="&quot;&#39;&gt;&lt;b&gt;">&lt;b&gt;&quot;&amp;</p>'
    )
    assert el("p", el("b", "x"), None, hidden=True, id=None) == "<p hidden><b>x</b></p>"
    assert visible("a\tb\nc é 漢 🙂") == "a\tb\nc é 漢 🙂"
    assert escape("\u200b\ufeff") == "⟨U+200B⟩⟨U+FEFF⟩"
    told = {"k</script>": [ATTACK, 1.0, float("inf"), None, True, 12]}
    held = embed(told)
    assert "<" not in held
    assert held.isascii()
    assert json.loads(held) == {"k</script>": [visible(ATTACK), 1, None, None, True, 12]}


def test_the_policy_allows_this_script_and_no_request(tmp_path):
    make_run(tmp_path / "a")
    html = render_runs(read_runs([tmp_path / "a"]))
    page = Page(html)
    (policy,) = [
        str(tag["content"]) for tag in page.find("meta")
        if tag.get("http-equiv") == "Content-Security-Policy"
    ]  # fmt: skip
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert fingerprint(script()) in policy
    assert fingerprint(style()) in policy
    assert f"<script>{script()}</script>" in html
    assert "</" not in script()  # nothing in it ends it
    for text in (script(), style(), html):
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\((?!#)|@import|fetch\(", text)


# ---- the command ----


def test_the_command_finds_runs_and_says_what_it_wrote(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b", seed=1)
    assert command.run(ReportConfig(paths=(tmp_path / "runs" / "a",))) == 0
    whole = (tmp_path / "runs" / "a" / "report.html").read_text()
    log = tmp_path / "runs" / "a" / "metrics.jsonl"
    assert command.run(ReportConfig(paths=(log,))) == 0
    again = (tmp_path / "runs" / "a" / "report.html").read_text()
    assert Page(again).data == Page(whole).data, "a run's own log never makes its page poorer"
    assert command.run(ReportConfig(paths=(tmp_path / "runs",))) == 0  # both, not the link to b
    page = Page((tmp_path / "runs" / "report.html").read_text())
    assert [run["name"] for run in json.loads(page.data)["runs"]] == ["a", "b"]
    out = tmp_path / "new" / "page.html"
    assert command.run(ReportConfig(paths=(tmp_path / "runs" / "a",), out=out)) == 0
    assert out.is_file()
    assert "open it in a browser" in capsys.readouterr().out


def test_what_cannot_be_drawn_is_a_sentence(tmp_path, sentence):
    make_run(tmp_path / "a")
    make_tournament(tmp_path / "t")
    both = sentence("report", str(tmp_path / "a"), str(tmp_path / "t"))
    assert "is a tournament and has a page of its own" in both

    def refuse(path: Path, text: str, **more) -> None:
        with pytest.raises(ValueError, match=text):
            command.run(ReportConfig(paths=(path,), **more))

    refuse(tmp_path / "nothing", "does not exist")
    refuse(tmp_path / "a", "--every 0 must be above 0", live=True, every=0)
    (tmp_path / "t" / "tournament.json").write_text("{")
    refuse(tmp_path / "t", "tournament.json is damaged")
    (tmp_path / "a" / "metrics.jsonl").write_text("{}\nno\n{}\n")
    refuse(tmp_path / "a", "metrics.jsonl line 2 is not JSON")


def test_too_many_runs_are_refused(tmp_path):
    paths = tuple(tmp_path / str(k) for k in range(command.MOST_RUNS + 1))
    for path in paths:
        RunFolder.create(path, {}, {})
    with pytest.raises(ValueError, match="29 runs are too many"):
        command.find(paths)


def test_live_pages_follow_until_the_run_is_over(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", finished=False)
    out = tmp_path / "a" / "report.html"
    seen = []

    def sleep(seconds: float) -> None:
        assert seconds == 7
        seen.append(out.read_text())
        if len(seen) == 2:  # nothing has changed between the first two looks
            run.append("metrics", {"step": 21, "reward": 0.5})
        if len(seen) == 3:
            run.finish({"steps": 21}, "words")

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert command.run(ReportConfig(paths=(run.path,), live=True, every=7)) == 0
    assert 'data-live="7"' in seen[0]
    assert '<noscript><meta http-equiv="refresh" content="7"></noscript>' in seen[0]
    assert seen[1] == seen[0]
    assert "21 of 20 steps so far" in seen[2]
    assert "data-live" not in out.read_text()  # the last one stands still


def test_reading_needs_no_torch():
    code = "import sys, mesotron.report.command; print(sorted({'torch', 'jax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


# ---- tournaments ----


def test_a_tournament_page_tells_who_won_and_what_failed(tmp_path):
    record = make_tournament(tmp_path / "t")
    html = render_tournament(tmp_path / "t")
    page = Page(html)
    assert "pion and muon are not told apart (p = 0.4). adamw is behind by 0.1." in page.text
    order = [page.text.index(f"{k}. {name}") for k, name in enumerate(("pion", "muon", "adamw"), 1)]
    assert order == sorted(order)
    assert page.text.count("0.51 to 0.59") == 2  # the first's interval: among the figures, and here
    assert "0.1 ■" in page.text  # a dead search cell
    assert "0.5 ★" in page.text  # the rate that was chosen
    assert "✕ failed" in page.text
    assert "out of memory </script>" in page.text  # and why, shown
    assert "adamw's best rate is the highest that was tried." in page.text
    assert "until reward has passed 0.4" in page.text
    charts = {chart["title"]: chart for chart in json.loads(page.data)["charts"]}
    assert len(charts["Reward"]["lines"]) == 6  # two seeds of three
    rates = charts["Greedy accuracy over learning rate"]
    assert rates["logX"]
    crossed = next(line for line in rates["lines"] if line.get("dots") == "crosses")
    assert (crossed["x"], crossed["y"]) == ([0.0016], [0.1])
    assert len(record.contenders) == len([t for t in page.find("button") if "data-run" in t])


def test_a_tournament_that_goes_on_has_a_page_too(tmp_path):
    record = make_tournament(tmp_path / "t")
    record.standings, record.words, record.threshold = [], [], None
    record.cells = record.cells[:3]
    record.cells[1].state = "running"
    record.cells[1].score = record.cells[1].verdict = None
    record.cells[2].state, record.cells[2].run = "waiting", ""
    write_tournament(tmp_path / "t", record)
    assert not command.is_over(tmp_path / "t")
    assert "1 of 3 cells are over." in Page(render_tournament(tmp_path / "t", live=5)).text
    make_tournament(tmp_path / "done")
    assert command.is_over(tmp_path / "done")


def test_nobody_without_a_score_is_called_the_best(tmp_path):
    record = make_tournament(tmp_path / "t")
    for row in record.standings:
        row.score = row.low = row.high = row.behind = row.p_holm = None
    write_tournament(tmp_path / "t", record)
    assert "the best" not in Page(render_tournament(tmp_path / "t")).text.replace(
        "behind the best", ""
    )
    record.standings, record.words = [], ["No contender has a score: see why in the cells."]
    write_tournament(tmp_path / "t", record)
    assert command.is_over(tmp_path / "t")


def test_cells_at_a_rate_that_was_given_up_are_not_drawn(tmp_path):
    record = make_tournament(tmp_path / "t")
    left = next(cell for cell in record.cells if cell.stage == "final")
    left.rate *= 4
    write_tournament(tmp_path / "t", record)
    page = Page(render_tournament(tmp_path / "t"))
    charts = {chart["title"]: chart for chart in json.loads(page.data)["charts"]}
    assert len(charts["Reward"]["lines"]) == 5  # of two seeds of three


def test_a_tournament_is_stamped_by_its_cells_and_not_by_what_is_being_written(tmp_path):
    make_tournament(tmp_path / "t")
    (tmp_path / "t" / ".tournament.json.writing").symlink_to(tmp_path / "gone")
    (tmp_path / "t" / "vanished.json").symlink_to(tmp_path / "gone")
    before = command.stamp(tmp_path / "t")
    metrics = next((tmp_path / "t").glob("cells/*/metrics.jsonl"))
    metrics.write_text(metrics.read_text() + '{"step": 11}\n')
    after = command.stamp(tmp_path / "t")
    changed = {name for name, *_ in set(after) - set(before)}
    assert changed == {str(metrics)}
    assert not any("writing" in name or "vanished" in name for name, *_ in after)


# ---- spectra, routing and the page after training ----


def test_spectra_and_routing_are_drawn_where_a_run_has_them(tmp_path):
    run = make_run(tmp_path / "a")
    for step in (1, 20):
        run.append("spectra", {"step": step, "block": "layers.0.up.weight", "rule": "pion",
                               "view": "whole", "shape": [3, 8], "rank": [1, 2, 3],
                               "before": [1.0, 0.5, 0.1], "after": [1.0, 0.9, 0.0]})  # fmt: skip
    row = {"name": "layers.0.up.weight", "shape": [3, 8], "role": "hidden", "rule": "pion",
           "view": "whole", "lr_scale": 1.0, "reason": "because", "aliases": []}  # fmt: skip
    run.save("routing", {"rows": [row]})
    page = page_of(run.path)
    chart = next(c for c in json.loads(page.data)["charts"] if c["xName"] == "rank")
    assert [line["name"] for line in chart["lines"]] == [
        "before the filter, step 20", "after the filter, step 20",
        "before the filter, step 1", "after the filter, step 1",
    ]  # fmt: skip
    assert chart["lines"][1]["y"] == [1, 0.9, 0]
    assert "Who is trained by which rule" in page.text
    assert "because" in page.text


def test_the_page_is_documented():
    text = (DOCS / "report.md").read_text()
    for flag in ("--out", "--live", "--every"):
        assert flag in text
    for chapter in CHAPTERS:
        assert chapter.question in text
