"""A page that follows runs: rewritten as a file, or served on this machine."""

import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from mesotron import cli
from mesotron.config import ReportConfig
from mesotron.report import command, live
from support.report_worlds import ATTACK, make_run, make_sample, make_tournament


@pytest.fixture
def going(tmp_path):
    """An unfinished run."""
    samples = [make_sample(step, f"word {step}") for step in range(1, 9)]
    return make_run(tmp_path / "a", finished=False, samples=[*samples, make_sample(9, ATTACK)])


@pytest.fixture
def server(going) -> Iterator[live.PageServer]:
    paths = [going.path]
    page_server = live.PageServer(paths, lambda every: command.render(paths, every), 0)
    thread = threading.Thread(target=page_server.serve_forever)
    thread.start()
    yield page_server

    page_server.shutdown()
    page_server.server_close()
    thread.join()


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        return answer.read().decode()


def test_live_pages_follow_until_the_run_is_over(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", finished=False)
    out = tmp_path / "a" / "report.html"
    seen = []

    def sleep(seconds: float) -> None:
        assert seconds == live.EVERY
        seen.append(out.read_text())

        if len(seen) == 2:  # nothing changed between the first two
            run.append("metrics", {"step": 21, "reward": 0.5})

        if len(seen) == 3:
            run.finish({"steps": 21}, lambda: "words")

    monkeypatch.setattr(live.time, "sleep", sleep)
    assert command.run(ReportConfig(paths=(run.path,), live=True)) == 0

    assert 'data-live="10"' in seen[0]
    assert seen[1] == seen[0]
    assert "step 21 of 20" in seen[2]
    assert 'data-live="' not in out.read_text()


def test_changes_are_seen_in_cells_but_not_in_temporary_files(tmp_path):
    folder = tmp_path / "t"
    make_tournament(folder)

    for name in (".tournament.json.writing", "vanished.json"):
        (folder / name).symlink_to(tmp_path / "gone")

    before = live.stamp(folder)
    metrics = next(folder.glob("cells/*/metrics.jsonl"))
    metrics.write_text(metrics.read_text() + '{"step": 11}\n')
    after = live.stamp(folder)

    assert {name for name, *_ in set(after) - set(before)} == {str(metrics)}
    assert not any("writing" in name or "vanished" in name for name, *_ in after)


def test_a_served_page_follows_the_run(server, going):
    page = get(server.address)
    assert "step 20 of 20" in page
    assert f'data-live="{live.EVERY:g}"' in page
    assert get(server.address) == page

    going.append("metrics", {"step": 21, "reward": 0.5})
    with (going.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 22, "rew')  # half a row: the run is writing it

    assert "step 21 of 20" in get(server.address)

    going.finish({"steps": 21}, lambda: "words")
    assert 'data-live="' not in get(server.address)


def test_a_live_page_shows_the_last_samples_and_runs_none(server):
    page = get(server.address)
    latest = page[page.index("Latest completions</h2>") : page.index("Is it still exploring?</h2>")]
    assert latest.index("step 9") < latest.index("word 8") < latest.index("word 6")
    assert "word 5" not in latest
    assert "window.hacked=1</script>" not in page


def test_nothing_is_served_without_the_token(server):
    assert len(server.token) >= 20
    assert server.server_address[0] == live.LOOPBACK

    root = server.address.removesuffix(f"{server.token}/")
    for path in ("", "index.html", f"{server.token[:-1]}/", f"{server.token}/../../config.json"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(f"{root}{path}")
        assert refused.value.code == 404
        refused.value.close()


def test_each_server_has_its_own_token(going):
    tokens = set()
    for _ in range(3):
        one = live.PageServer([going.path], lambda _: "", 0)
        one.server_close()
        tokens.add(one.token)

    assert len(tokens) == 3


def test_a_run_that_is_being_moved_is_no_end(server, going):
    aside = going.path.rename(going.path.with_name("aside"))
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(server.address)
    assert refused.value.code == 503
    refused.value.close()

    aside.rename(going.path)
    assert "step 20 of 20" in get(server.address)


@pytest.mark.parametrize(
    ("error", "is_told"), [(ConnectionResetError, False), (ZeroDivisionError, True)]
)
def test_a_browser_that_goes_away_is_no_error(server, monkeypatch, capsys, error, is_told):
    def fail(*_) -> None:
        raise error

    monkeypatch.setattr(live.PageHandler, "send_response", fail)
    with pytest.raises(http.client.RemoteDisconnected):
        get(server.address)

    assert ("Traceback" in capsys.readouterr().err) == is_told


def test_a_missing_run_and_a_taken_port_are_one_error(server, going, tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "none" in capsys.readouterr().err

    assert cli.main(["report", str(going.path), "--port", str(server.server_port)]) == 2
    assert "--port" in capsys.readouterr().err

    assert cli.main(["report", str(going.path), "--port", "70000"]) == 2
    assert "--port" in capsys.readouterr().err

    words = ["report", str(going.path), "--port", "0", "--out", str(tmp_path / "page.html")]
    assert cli.main(words) == 2
    assert "--out" in capsys.readouterr().err


def test_ctrl_c_ends_the_server(going, monkeypatch, capsys):
    def interrupt(_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(live.PageServer, "serve_forever", interrupt)
    assert cli.main(["report", str(going.path), "--port", "0"]) == 0
    assert live.LOOPBACK in capsys.readouterr().out
