"""The command's contract: help without heavy imports, one sentence for a mistake, quiet exits."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import mesotron as package
from mesotron import cli, config
from mesotron.arguments import UsageError, parse
from mesotron.flags import required

HEAVY = {"torch", "jax", "numpy", "matplotlib", "transformers"}
CONFIGS = [kind for kind in vars(config).values() if is_dataclass(kind)]


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["bench", "optim"], ["spectrum", "--help"], ["spectrum", "--x"]],
)
def test_nothing_heavy_is_imported_before_the_words_are_understood(words):
    code = (
        "import sys\nfrom mesotron.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        f"print('HEAVY', sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []", done


def test_importing_the_package_loads_no_framework():
    code = "import sys, mesotron; dir(mesotron); print(sorted({'torch', 'jax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done


def test_every_public_name_loads():
    for name in package.__all__:
        if name == "jax" and find_spec("jax") is None:
            continue  # its room needs the extra of that name
        assert getattr(package, name) is not None
        assert name in dir(package)


def test_an_unknown_public_name_raises_as_usual():
    with pytest.raises(AttributeError, match="'mesotron' has no attribute 'nope'"):
        package.nope  # noqa: B018


def test_every_command_is_listed_and_has_help(mesotron):
    listing = mesotron("--help").stdout
    for name, command in cli.COMMANDS.items():
        assert f"mesotron {name} " in listing
        shown = mesotron(*name.split(), "--help")
        assert shown.returncode == 0
        assert shown.stdout.startswith(f"usage: mesotron {name}")
        words = " ".join(shown.stdout.replace("│", " ").split())
        assert "(default: None)" not in words
        assert "(default: )" not in words
        for item in fields(command.config_type):
            assert f"--{item.name.replace('_', '-')}" in shown.stdout


def test_every_command_leads_to_a_function():
    for command in cli.COMMANDS.values():
        assert callable(cli.load(command.target))


def test_no_words_print_the_overview(mesotron):
    done = mesotron()
    assert done.returncode == 0
    assert done.stdout == mesotron("--help").stdout


def test_version_is_that_of_the_package(mesotron):
    assert mesotron("--version").stdout == f"mesotron {package.__version__}\n"


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_are_frozen_and_say_what_they_are(kind):
    assert kind.__dataclass_params__.frozen
    assert all(item.kw_only for item in fields(kind))
    assert kind.__doc__
    assert not kind.__doc__.startswith(f"{kind.__name__}(")  # the text dataclasses make up


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("spectrom", "unknown command 'spectrom' (did you mean spectrum?)"),
        ("--verbose", "unknown flag '--verbose'"),
        ("bench train", "python -m benchmarks.training"),
        ("bundle rlvr", "python -m benchmarks.offline"),
        ("spectrum --shap 3 4", "unknown flag --shap (did you mean --shape?)"),
        ("spectrum -x", "unknown flag -x"),
        ("spectrum --shape 3", "--shape '3' is not valid: expected 2 values, each a whole number"),
        ("spectrum --shape 3 x", "--shape 'x' is not valid"),
        ("spectrum --shape 0 4", "shape (0, 4) is not a matrix"),
        ("spectrum --cutoff nois", "(did you mean noise?): expected one or more values, each a nu"),
        ("spectrum --cutoff 1.5", "'aligned', 'noise' or a fraction between 0 and 0.8165"),
        ("spectrum --steps", "--steps needs a whole number"),
        ("spectrum --steps 0", "0 is not a usable number of steps"),
        ("spectrum --filters", "--filters needs one or more values"),
        ("spectrum muno", "unknown filter 'muno'"),
        ("spectrum --axis=lin", "--axis 'lin' is not valid (did you mean linear?)"),
        ("spectrum pion --promote 9", "promote=9 must lie between 0 and steps=5"),
        ("spectrum muon --promote 2", "add pion to the filters"),
        ("spectrum --plot a.gif", "end the name in .png, .svg or .pdf"),
        ("spectrum --config absent.toml", "absent.toml: No such file or directory"),
        ("spectrum --config", "--config needs a TOML file"),
        ("spectrum --out /absent/dir/a.json", "/absent/dir/a.json: No such file or directory"),
        ("route", "MODEL is missing"),
        ("route a b", "unexpected argument 'b'"),
        ("route a --optim sgd", "expected one of muon, pion, muon_sgd, adamw"),
    ],
)
def test_a_mistake_gets_one_sentence(sentence, words, told):
    assert told in sentence(*words.split())


def test_a_bug_keeps_its_traceback(monkeypatch):
    def run(_):  # its frame is outside the package, as a ValueError from numpy would be
        int("1", base=99)

    monkeypatch.setattr(cli, "load", lambda target: run)
    with pytest.raises(ValueError, match="base"):
        cli.main(["spectrum"])


def test_other_exceptions_are_not_hidden(monkeypatch):
    def run(_):
        raise KeyError("bug")

    monkeypatch.setattr(cli, "load", lambda target: run)
    with pytest.raises(KeyError):
        cli.main(["spectrum"])


def test_an_oserror_that_is_not_the_systems_is_not_hidden(monkeypatch):
    def run(_):
        raise OSError("a library's own use of the class")

    monkeypatch.setattr(cli, "load", lambda target: run)
    with pytest.raises(OSError, match="own use"):
        cli.main(["spectrum"])


def test_a_terminal_without_unicode_gets_question_marks():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "mesotron", "spectrum", "muon"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "response f(?)" in done.stdout


def test_ctrl_c_is_one_line_and_130(monkeypatch, capsys):
    def run(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load", lambda target: run)
    assert cli.main(["spectrum"]) == 130
    assert capsys.readouterr().err == "mesotron: interrupted\n"


def test_ctrl_c_passes_on_what_the_command_says(monkeypatch, capsys):
    def run(_):
        raise KeyboardInterrupt("the same command continues")

    monkeypatch.setattr(cli, "load", lambda target: run)
    assert cli.main(["spectrum"]) == 130
    assert capsys.readouterr().err == "mesotron: interrupted; the same command continues\n"


def test_a_real_interrupt_leaves_no_traceback(tmp_path):
    """A process that works until it is interrupted, in the place of a command."""
    started = tmp_path / "started"
    code = (
        "import pathlib, signal, sys, time\nfrom mesotron import cli\n"
        # A shell starts background jobs with interrupts ignored, and this test may be one's child.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def run(config):\n"
        f"    pathlib.Path({str(started)!r}).touch()\n"
        "    time.sleep(60)\n"
        "cli.load = lambda target: run\n"
        "sys.exit(cli.main(['spectrum']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "mesotron: interrupted\n")


@pytest.mark.parametrize("words", [["--help"], ["spectrum"]])
def test_a_closed_pipe_is_quiet(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mesotron", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A config inside another."""

    name: str = "pion"
    """A name."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """All kinds of fields."""

    things: tuple[str, ...] = field(default=("a",), metadata=config.POSITIONAL)
    """Any number."""
    rate: float = 0.1
    """A number."""
    fast_mode: bool = False
    """A switch."""
    size: int | None = None
    """Perhaps a number."""
    optim: Inner = Inner()
    """Nested."""


def read(words: str) -> Outer:
    return parse(Outer, words.split(), "mesotron outer")


def test_flags_in_every_spelling():
    assert read("") == Outer()
    assert read("x y --rate -0.5 --fast-mode --size=3") == Outer(
        things=("x", "y"), rate=-0.5, fast_mode=True, size=3
    )
    assert read("--fast_mode x").things == ("x",)  # a switch takes no value
    assert read("--fast-mode --no-fast-mode").fast_mode is False
    assert read("--rate 1 x") == Outer(rate=1.0, things=("x",))
    assert read("--optim.name muon").optim.name == "muon"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_toml_gives_defaults_and_flags_win(tmp_path):
    file = write(
        tmp_path / "run.toml",
        'things = ["p", "q"]\nrate = 2\nfast_mode = true\n[optim]\nname = "muon"\n',
    )
    assert read(f"--config {file}") == Outer(
        things=("p", "q"), rate=2.0, fast_mode=True, optim=Inner(name="muon")
    )
    won = read(f"z --config={file} --rate 3 --no-fast-mode")
    assert (won.things, won.rate, won.fast_mode, won.optim.name) == (("z",), 3.0, False, "muon")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rat = 1", r"unknown key 'rat' \(did you mean rate\?\); known: fast-mode, optim.name, ra"),
        ("[optim]\nsize = 1", "unknown key 'optim.size'"),
        ("rate = 'x'", "--rate 'x' is not valid: expected a number"),
        ("fast_mode = 1", "expected true or false"),
        ("rate =", "is not valid TOML"),
    ],
)
def test_a_wrong_toml_file_raises(tmp_path, text, told):
    with pytest.raises(UsageError, match=told):
        read(f"--config {write(tmp_path / 'run.toml', text)}")


def test_a_toml_file_in_another_encoding_raises(tmp_path):
    file = tmp_path / "run.toml"
    file.write_bytes("# größer\nrate = 2\n".encode("latin-1"))
    with pytest.raises(UsageError, match="is not valid TOML: 'utf-8' codec"):
        read(f"--config {file}")


def test_two_toml_files_raise(tmp_path):
    file = write(tmp_path / "run.toml", "rate = 2\n")
    with pytest.raises(UsageError, match="--config is given more than once"):
        read(f"--config {file} --config={file}")


def test_every_shipped_config_reads_its_own_defaults():
    for kind in CONFIGS:
        missing = [word for name in required(kind) for word in (f"--{name}", "x")]
        made = parse(kind, missing, "mesotron x")
        assert isinstance(made, kind)


def test_a_line_reaches_a_log_file_when_it_is_said(tmp_path):
    """Block-buffered, the file would stay empty until the command ends."""
    code = (
        "import sys, types\nfrom mesotron import cli\n"
        "def run(config):\n    print('first line')\n    sys.stdin.read()\n    return 0\n"
        "sys.modules['slow'] = types.SimpleNamespace(run=run)\n"
        "cli.COMMANDS['spectrum'] = cli.COMMANDS['spectrum']._replace(target='slow:run')\n"
        "sys.exit(cli.main(['spectrum']))\n"
    )
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=file)
    deadline = time.monotonic() + 60
    while not log.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    alive, said = process.poll() is None, log.read_text()
    process.communicate()
    assert (alive, said, process.returncode) == (True, "first line\n", 0)
