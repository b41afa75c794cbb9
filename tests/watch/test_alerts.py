"""Alerts: what a server gets, what is never shown, and that nothing stops training."""

import json
import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from mesotron import Watch, cli
from mesotron.config.train import RunWatchConfig
from mesotron.watch import alerts as alerts_of_watch
from mesotron.watch.alerts import MOST_PER_HOUR, MOST_QUEUED, QUIET, Alerts, Channel
from mesotron.watch.detectors import Event, Evidence
from support.watch_streams import FAILURES

EVENT = Event(
    step=120,
    detector="reward_collapse",
    severity="stop",
    began=97,
    diagnosis="the reward has fallen from its best",
    remedy="halve the learning rate <now> & wait",
    changes=(
        {
            "field": "optim.lr",
            "act": "multiply",
            "value": 0.5,
        },
    ),
    evidence=(
        Evidence(
            metric="reward",
            since="best",
            before=0.71,
            now=0.14,
        ),
    ),
)

DEAD = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture
def server():
    """A server that keeps what it gets: path, headers, body."""
    posts = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posts.append((self.path, dict(self.headers), body))
            self.send_response(500 if "broken" in self.path else 204)
            self.end_headers()

        def log_message(self, *_):
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    http.posts = posts
    http.url = f"http://127.0.0.1:{http.server_port}"
    yield http
    http.shutdown()
    thread.join()
    http.server_close()


def test_each_service_gets_its_own_format(server, monkeypatch, tmp_path):
    for name in ("slack", "discord", "ntfy"):
        monkeypatch.setenv(f"MY_{name}", f"{server.url}/{name}")

    out = tmp_path / "out.json"
    code = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    channels = [
        f"webhook:{server.url}/hook",
        "slack:$MY_slack",
        "discord:${MY_discord}",
        "ntfy:$MY_ntfy",
        f'command:{sys.executable} -c "{code}"',
    ]

    alerts = Alerts(
        channels,
        run="demo",
        link="http://page",
        price=3.95,
    )

    assert alerts.send(EVENT)
    alerts.close(60)
    bodies = {path: (headers, body) for path, headers, body in server.posts}
    headers, body = bodies["/hook"]

    assert headers["Content-Type"] == "application/json"
    payload = json.loads(body)
    assert payload == json.loads(out.read_text())

    expected = {
        "schema": "mesotron.alert/1",
        "run": "demo",
        "detector": "reward_collapse",
        "severity": "stop",
        "step": 120,
        "began": 97,
        "dollars_per_hour": 3.95,
        "link": "http://page",
    }

    assert {name: payload[name] for name in expected} == expected
    described = {"title", "text", "diagnosis", "evidence", "remedy", "changes"}
    assert payload.keys() == expected.keys() | described
    assert (payload["evidence"][0]["now"], payload["changes"][0]["value"]) == (0.14, 0.5)

    for part in (EVENT.remedy, "97", "0.71 to 0.14", "$3.95", "http://page"):
        assert part in payload["text"]

    slack = json.loads(bodies["/slack"][1])
    assert "&lt;now&gt; &amp;" in slack["blocks"][0]["text"]["text"]  # no links or mentions

    discord = json.loads(bodies["/discord"][1])
    assert "demo" in discord["embeds"][0]["title"]
    assert discord["allowed_mentions"] == {"parse": []}

    headers, text = bodies["/ntfy"]
    assert (headers["Priority"], b"halve" in text) == ("5", True)


def test_alerts_are_few():
    now = [0.0]
    alerts = Alerts((), clock=lambda: now[0])

    def send(detector: str, severity: str = "stop") -> bool:
        return alerts.send(replace(EVENT, detector=detector, severity=severity))

    assert not send("a", "clear")  # what was not reported is not cleared
    for severity in ("warn", "clear", "stop"):
        assert [send("a", severity), send("a", severity)] == [True, False]

    now[0] = QUIET
    assert send("a")
    assert sum(send(f"d{k}") for k in range(50)) < MOST_PER_HOUR

    now[0] += 3600
    assert send("z")

    alerts.close()


def test_failures_are_logged_once_without_the_address(server, monkeypatch, caplog):
    monkeypatch.setenv("SECRET_URL", f"{server.url}/broken-secret")
    monkeypatch.setenv("DEAD_URL", f"{DEAD}/secret")
    channels = ["slack:$SECRET_URL", "webhook:$DEAD_URL", "command:no-such-program secret", "wandb"]

    alerts = Alerts(channels, clock=iter(range(0, 9**9, 9**5)).__next__)
    with caplog.at_level(logging.WARNING):
        assert alerts.send(EVENT)
        assert alerts.send(EVENT)
        alerts.close(60)

    assert len(caplog.records) == len(channels)
    assert "secret" not in caplog.text


def test_sending_does_not_wait(caplog, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(Channel, "send", lambda *_: gate.wait())

    alerts = Alerts(["wandb"], clock=iter(range(0, 9**9, 9**5)).__next__)
    sent = [alerts.send(EVENT) for _ in range(300)]
    assert sent.count(True) <= MOST_QUEUED + 1  # one is being sent

    alerts.close(0)
    assert "not sent" in caplog.text

    gate.set()


class Hostile:
    """A server that sends `begin`, then `drip` for ever; `cut` is set when the client has gone."""

    def __init__(self, begin, drip, scheme="http"):
        self.begin = begin
        self.drip = drip
        self.cut = threading.Event()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}/secret"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.cut.set()
        self._listener.close()

    def _serve(self):
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                with connection, suppress(OSError):
                    connection.sendall(self.begin.replace(b"URL", self.url.encode()))
                    while self.drip and not self.cut.wait(0.01):
                        connection.sendall(self.drip)
                self.cut.set()


RECORD = b"\x16\x03\x03\x40\x00"  # of a TLS handshake: 16,384 bytes follow
ANSWER = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("begin", "drip", "scheme"),
    [
        (b"", b"H", "http"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "http"),
        (RECORD, b"\x02", "https"),
        (b"no TLS here\r\n", b"", "https"),
        (b"", b"\0" * 100_000, "http"),
        (b"HTTP/1.1 302 Found\r\nLocation: URL\r\nContent-Length: 0\r\n\r\n", b"", "http"),
        (b"HTTP/1.1 307 x\r\nLocation: file:///etc/passwd\r\n\r\n", b"", "http"),
    ],
    ids=["line", "continues", "handshake", "plain", "garbage", "loop", "file"],
)
def test_a_hostile_server_holds_up_no_other_channel_and_is_cut(
    server, monkeypatch, caplog, begin, drip, scheme
):
    monkeypatch.setattr(alerts_of_watch, "TIMEOUT", 0.5)
    with Hostile(begin, drip, scheme) as hostile:
        alerts = Alerts([f"webhook:{hostile.url}", f"webhook:{server.url}/hook"])
        assert alerts.send(EVENT)

        assert hostile.cut.wait(60)
        alerts.close(60)

    assert [path for path, _, _ in server.posts] == ["/hook"]
    assert "an alert to webhook was not sent" in caplog.text
    assert "secret" not in caplog.text
    assert hostile.connections == 1


@pytest.mark.parametrize(
    ("rest", "drip"),
    [(b"Content-Length: 99999999999999\r\n\r\n", b"x" * 1_000_000), (b"", b"A: b\r\n")],
    ids=["body", "headers"],
)
def test_an_answer_without_end_is_not_awaited(monkeypatch, caplog, rest, drip):
    monkeypatch.setattr(alerts_of_watch, "TIMEOUT", 0.5)
    with Hostile(ANSWER + rest, drip) as hostile:
        alerts = Alerts([f"webhook:{hostile.url}"])
        assert alerts.send(EVENT)
        alerts.close(60)

    assert caplog.text == ""


def test_what_a_program_started_ends_with_it(tmp_path):
    note = tmp_path / "pid"
    script = tmp_path / "alert.sh"
    script.write_text(f"sleep 600 &\necho $! > {note}\n")

    alerts = Alerts([f"command:sh {script}"])
    assert alerts.send(EVENT)
    alerts.close(60)

    assert ends(int(note.read_text()))


def ends(pid: int) -> bool:
    """Whether a process that was sent a signal ends; a busy machine may take a while."""
    for _ in range(600):
        if not psutil.pid_exists(pid):
            return True

        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True

        time.sleep(0.1)

    return False


@pytest.mark.parametrize(
    ("channel", "match"),
    [
        ("slack:https://hooks.slack.com/services/T0/B0/secret", "hooks.slack.com"),
        ("webhook:https://user:secret@example.com/hook?key=secret", "example.com"),
        ("slack:$NOT_EXPORTED", "NOT_EXPORTED"),
        ("pigeon:secret", "pigeon"),
        ("ntfy:two words", "ntfy"),
    ],
)
def test_channels_that_cannot_be_used(channel, match, tmp_path, capsys):
    log = tmp_path / "a.jsonl"
    log.write_text('{"step": 1, "reward": 0.5}\n')
    assert cli.main(["watch", str(log), "--alerts", channel]) == 2

    error = capsys.readouterr().err
    assert match in error
    assert "secret" not in error


def watched(channels) -> Watch:
    """A watch that has seen a run collapse."""
    watch = Watch("stop", alerts=channels)
    state = TrainerState()
    control = TrainerControl()
    args = TrainingArguments("outputs/demo", use_cpu=True, report_to="none")
    watch.on_train_begin(args, state, control)

    for row in FAILURES["reward_collapse"](0):
        state.global_step = int(row["step"])
        watch.on_log(args, state, control, logs={"loss": 0.0, **row})

    watch.on_train_end(args, state, control)
    return watch


def test_a_watch_sends_its_events_and_does_not_need_to(server, monkeypatch):
    monkeypatch.setenv("HOOK", f"{server.url}/hook")
    watch = watched(["webhook:$HOOK"])
    payloads = [json.loads(body) for _, _, body in server.posts]
    sent = {(each["detector"], each["severity"]) for each in payloads}

    assert (watch.stopped_by.detector, "stop") in sent
    assert payloads[0]["run"] == "demo"
    assert watched([f"webhook:{DEAD}"]).events == watch.events == watched([]).events


def test_configs_hold_no_address():
    assert RunWatchConfig(alerts=("slack:$SLACK_URL",)).alerts == ("slack:$SLACK_URL",)
    with pytest.raises(ValueError, match="password") as error:
        RunWatchConfig(alerts=("slack:https://hooks.slack.com/secret",))
    assert "secret" not in str(error.value)


def test_the_command_sends_the_diagnosis(server, tmp_path, capsys):
    log = tmp_path / "metrics.jsonl"
    rows = FAILURES["reward_collapse"](0)
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["watch", str(log), "--alerts", f"webhook:{server.url}", "--price", "2"]

    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--follow", "--every", "0.01", "--idle", "0.01"]) == 0

    first, *rest = [json.loads(body) for _, _, body in server.posts]
    assert (first["severity"], first["dollars_per_hour"]) == ("stop", 2)
    assert first["detector"] in {each["detector"] for each in rest}
    assert server.url not in capsys.readouterr().out
