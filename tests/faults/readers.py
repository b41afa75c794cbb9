"""Everything that reads somebody else's files, with random input: nothing runs, nothing outside is
touched, and the answer is a result or one sentence.

Each input lies in a folder of its own beside a home with a few files. Around each reader the tree
of that home is compared (content, links, times), and an audit hook watches every file that is
opened for writing, every change of the file system, every process and every code object.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from faults import fuzz
from faults.fuzz import Traceback, run, time_limit
from faults.kills import say
from mesotron import cli
from mesotron.config import ModelConfig, TaskConfig, TrainConfig
from mesotron.config.base import from_plain, to_plain, unchecked, validate
from mesotron.models.load import load_model
from mesotron.models.names import TINY_WEIGHTS
from mesotron.rlvr.train import resume_plan
from mesotron.runs.resume import settings_to_resume
from mesotron.tasks import prompts
from mesotron.tasks.load import load_task
from mesotron.watch.alerts import Alerts

CODE = "open({ran!r}, 'w').close()\nf = W = dict\n"
EVIL = "{{{{ cycler.__init__.__globals__.os.system('touch {ran}') }}}}"
ANY = (None, True, -1, 0, 1, 2.5, 10**400, 2**63, "", "x", "\0", "\x1b[2J", "../x", [], {}, [[]])
BIG = (2**31, 2**60, 2**63, 2**64 - 1)
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod")
PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


# Watching


class Watcher:
    """What happens in the process while `folder` is set. A hook cannot be taken off again."""

    def __init__(self) -> None:
        self.folder: Path | None = None  # of the input: may be written to
        self.seen: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return

        if event in PROCESSES:
            self.seen.append(f"{event} {args[:2]}")
        elif event == "exec":
            if str(self.folder) in args[0].co_filename:
                self.seen.append(f"ran {args[0].co_filename}")
        elif event == "open":
            if args[2] is not None and args[2] & WRITING:
                self._check(event, args[0])
        elif event in CHANGES:
            places = {"os.rename": args[:2], "os.link": args[1:2], "os.symlink": args[1:2]}
            for path in places.get(event, args[:1]):
                self._check(event, path)

    def _check(self, event: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return

        place = Path(os.getcwd(), os.fsdecode(path))
        real = place.resolve() if event == "open" else place.parent.resolve() / place.name
        own = Path(str(self.folder)).resolve()
        if str(real) != os.devnull and not real.is_relative_to(own):
            self.seen.append(f"{event} {real}")

    @contextlib.contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        self.folder = folder
        self.seen = []
        try:
            yield
        finally:
            self.folder = None

        if self.seen:
            raise Traceback(f"outside of the input's folder: {self.seen[:5]}")


_watcher: list[Watcher] = []


def watcher() -> Watcher:
    if not _watcher:
        _watcher.append(Watcher())

    return _watcher[0]


def listing(root: Path) -> dict[str, tuple[Any, ...]]:
    """Every entry of a tree: type, time of change, and its target or content."""
    entries: dict[str, tuple[Any, ...]] = {}
    for above, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(above, name)
            facts = path.lstat()
            content: Any = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = hashlib.sha256(path.read_bytes()).hexdigest()

            entries[str(path.relative_to(root))] = (facts.st_mode, facts.st_mtime_ns, content)

    return entries


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what libraries write to the standard error: a panic of Rust prints its own lines."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)

    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


def one_sentence(work: Callable[[], Any]) -> None:
    """Run what a command would; an error that would print a traceback is a failure."""
    try:
        work()
    except BaseException as error:
        if isinstance(error, Traceback | KeyboardInterrupt):
            raise
        if cli.message_for_user(error) is None:
            raise Traceback(f"{type(error).__module__}.{type(error).__name__}: {error}") from error


# Random input: a reader makes its files, and returns the work that reads them

Work = Callable[[], None]


class Source:
    """Random values for one input."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)

    def pick(self, options: Any) -> Any:
        return self.rng.choice(list(options))

    def bytes(self, most: int = 64) -> bytes:
        return self.rng.randbytes(self.rng.randrange(most))

    def value(self) -> Any:
        kind = self.rng.randrange(4)
        if kind == 0:
            return self.rng.randrange(-5, 2000)
        if kind == 1:
            return [self.pick(ANY), self.pick(ANY)]
        if kind == 2:
            return {self.pick(("a", "type", "pattern")): self.pick(ANY)}

        return self.pick(ANY)

    def damage(self, data: bytes) -> bytes:
        """Bytes cut, changed, doubled or replaced."""
        kind = self.rng.randrange(5)
        place = self.rng.randrange(len(data) + 1)
        if kind == 0:
            return data[:place]
        if kind == 1:
            return data[:place] + self.bytes() + data[place:]
        if kind == 2:
            return data[place:] + data[:place]
        if kind == 3:
            return self.bytes()

        changed = bytearray(data)
        for _ in range(1 + self.rng.randrange(8)):
            if changed:
                changed[self.rng.randrange(len(changed))] = self.rng.randrange(256)

        return bytes(changed)

    def mutate(self, tree: Any, changes: int = 3) -> Any:
        """JSON with some values replaced, added or removed, at any depth."""
        tree = json.loads(json.dumps(tree))
        for _ in range(1 + self.rng.randrange(changes)):
            self._mutate_once(tree)

        return tree

    def _mutate_once(self, node: Any) -> None:
        while isinstance(node, dict | list) and node:
            key = self.pick(node) if isinstance(node, dict) else self.rng.randrange(len(node))
            inner = node[key]
            if isinstance(inner, dict | list) and inner and self.rng.random() < 0.7:
                node = inner
                continue

            if self.rng.random() < 0.15:
                del node[key]
            else:
                node[key] = self.value()
            return


def write(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(data, bytes):
        path.write_bytes(data)
    elif isinstance(data, str):
        path.write_text(data, encoding="utf-8", errors="surrogatepass")
    else:
        path.write_text(json.dumps(data))

    return path


# Models


def copy_model(folder: Path) -> Path:
    """The tiny model; its weights are a link, as in the hub's cache."""
    folder.mkdir(parents=True)
    for path in TINY_WEIGHTS.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            shutil.copy(path, folder)

    return folder


def load(place: Path) -> tuple[Any, Any]:
    return load_model(ModelConfig(name=str(place)))


def model(source: Source, folder: Path) -> Work:
    kind = source.rng.randrange(5)
    if kind < 2:
        file = write(folder / "model.gguf", gguf(source))
        return lambda: one_sentence(lambda: load(file))

    place = copy_model(folder / "model")
    if kind == 2:
        weights = place / "model.safetensors"
        data = weights.read_bytes()
        weights.unlink()
        write(weights, safetensors(source, data))
    else:
        name = source.pick(("config.json", "config.json", "generation_config.json"))
        content = json.loads((place / name).read_text())
        if source.rng.random() < 0.8:
            write(place / name, source.mutate(content))
        else:
            write(place / name, source.damage((place / name).read_bytes()))

    def work() -> None:
        one_sentence(lambda: load(place))
        if source.rng.random() < 0.1:
            run("optim", "route", str(place))

    return work


def safetensors(source: Source, data: bytes) -> bytes:
    """A file with another header, another length of it, or other bytes."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    if source.rng.random() < 0.4:
        return struct.pack("<Q", source.pick((*BIG, 0, 1, size - 1, size + 1))) + data[8:]
    if source.rng.random() < 0.5:
        text = json.dumps(source.mutate(header)).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return data[: 8 + size // 2] + source.damage(data[8 + size // 2 : 8 + size + 64])


def gguf(source: Source) -> bytes:
    """A header of random keys, values and tensors, whose counts and lengths may be impossible."""

    def number(usual: int) -> bytes:
        value = source.pick(BIG) if source.rng.random() < 0.1 else usual
        return struct.pack("<Q", value)

    def text(value: bytes) -> bytes:
        return number(len(value)) + value

    def entry(name: bytes) -> bytes:
        kind = source.pick((0, 4, 6, 7, 8, 8, 9, 10, 12, 13, 99))
        if kind == 8:
            value = text(source.pick((b"llama", b"gpt2", b"qwen2", source.bytes())))
        elif kind == 9:
            inner = source.pick((0, 4, 8, 9))
            count = source.rng.randrange(4)
            values = b"".join(text(b"a") if inner == 8 else bytes(4) for _ in range(count))
            value = struct.pack("<I", inner) + number(count) + values
        else:
            value = source.bytes(12)

        return text(name) + struct.pack("<I", kind) + value

    names = [b"llama.block_count", b"tokenizer.ggml.model", b"tokenizer.ggml.tokens", b"x"]
    entries = [text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")]
    entries += [entry(source.pick(names)) for _ in range(source.rng.randrange(4))]

    tensors = []
    for _ in range(source.rng.randrange(3)):
        dims = b"".join(number(2) for _ in range(2))
        tensors.append(text(b"t") + struct.pack("<I", 2) + dims + struct.pack("<I", 0) + number(0))

    counts = number(len(tensors)) + number(len(entries))
    whole = b"GGUF" + struct.pack("<I", 3) + counts + b"".join([*entries, *tensors]) + bytes(64)
    return whole if source.rng.random() < 0.8 else source.damage(whole)


# Tokenizers and templates

PATTERNS = (
    "(a+)+$",
    "(",
    "((a|aa)+)+c",
    "",
    "(?=a)",
    "\\p{L}+|.",
    "(?i:x)",
    "[[:alpha:]]{1,99999}",
)
PARTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor", "model", "added_tokens")
TEXTS = ("", "What is 3 + 4?", "a" * 60 + "b", "\ud800", "\0é٣" * 9, "<|im_end|>" * 3)


def tokenizer(source: Source, folder: Path) -> Work:
    place = copy_model(folder / "model")
    content = json.loads((place / "tokenizer.json").read_text())
    kind = source.rng.randrange(5)
    if kind == 0:
        pattern = {"Regex": source.pick(PATTERNS)}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        replace = {"type": "Replace", "pattern": pattern, "content": "ab"}
        part, value = source.pick(
            (("pre_tokenizer", split), ("normalizer", replace), ("decoder", replace))
        )
        write(place / "tokenizer.json", content | {part: value})
    elif kind == 1:
        part = source.pick(PARTS)
        write(place / "tokenizer.json", content | {part: source.mutate([content[part]])[0:1]})
    elif kind == 2:
        write(place / "tokenizer.json", source.mutate(content))
    elif kind == 3:
        config = json.loads((place / "tokenizer_config.json").read_text())
        auto = {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "T"}
        files = {"vocab_file": "../../home/secret", "tokenizer_file": "../../home/secret"}
        more = source.pick((auto, files, {}, {"chat_template": source.value()}))
        write(place / "tokenizer_config.json", source.mutate(config) | more)
        write(place / "evil.py", CODE.format(ran=str(folder / "ran")))
    else:
        name = source.pick(("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"))
        write(place / name, source.damage((place / name).read_bytes()))

    return lambda: one_sentence(lambda: use_tokenizer(load(place)[1]))


def use_tokenizer(read: Any) -> None:
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    for text in (prompts.render(chat, read), *TEXTS[:-3], TEXTS[-1]):
        read.decode(read.encode(text, add_special_tokens=False))


STATEMENTS = (
    "{{% for a in range(99999) %}}{inner}{{% endfor %}}",
    "{{% for m in messages %}}{inner}{{% endfor %}}",
    "{{% if messages %}}{inner}{{% endif %}}",
    "{{% macro f(n) %}}{inner}{{% endmacro %}}{{{{ f(3) }}}}",
    "{{% set x = {expression} %}}{inner}",
    "{{% set ns = namespace(a={expression}) %}}{inner}{{{{ ns.a }}}}",
    "{{{{ {expression} }}}}{inner}",
    "{{% generation %}}{inner}{{% endgeneration %}}",
    "{inner}{{% endfor %}}",
)
EXPRESSIONS = (
    "messages",
    "messages[0].content",
    "messages[0].content.__class__.__mro__[1].__subclasses__()",
    "cycler.__init__.__globals__.os.system('touch ran')",
    "lipsum.__globals__['os'].popen('touch ran').read()",
    "self._TemplateReference__context",
    "namespace.__init__.__globals__",
    "''.__class__.__base__.__subclasses__()",
    "('%s' * 99)|format(1)",
    "range(99999)|map('string')|join",
    "range(99999)|sum",
    "9 ** 9 ** 3",
    "raise_exception('no')",
    "strftime_now('%Y')",
    "messages|tojson|tojson",
    "undefined.name",
    "1 / 0",
    "dict(a=1)['b']",
    "joiner(',')",
    "x",
    "'",
)


def template(source: Source, folder: Path) -> Work:
    text = source.pick(("", "x", "{{ messages[0].content }}", "{% include 'a' %}", "{#", "\0"))
    for _ in range(1 + source.rng.randrange(4)):
        statement = source.pick(STATEMENTS)
        text = statement.format(inner=text, expression=source.pick(EXPRESSIONS))

    place = copy_model(folder / "model")
    write(place / "chat_template.jinja", text)
    return lambda: one_sentence(lambda: use_tokenizer(load(place)[1]))


# Run folders

ENTRIES = (
    "lock",
    "samples.jsonl",
    "metrics.jsonl",
    "events.jsonl",
    "spent.json",
    ".spent.json.writing",
    "env.json",
    "result.json",
    "report.html",
    "export",
    "eval",
    "checkpoints",
    "checkpoints/checkpoint-2",
    "checkpoints/checkpoint-1/manifest.json",
    "checkpoints/checkpoint-1/.token",
)
COMMANDS = (
    ("watch",),
    ("report",),
    ("eval",),
    ("export",),
    ("train", "--resume"),
    ("sft", "--resume"),
    ("plan", "--resume"),
    ("vla", "eval"),
    ("ppo", "snake", "--resume"),
)


def run_folder(source: Source, folder: Path) -> Work:
    gift = folder / "gift"
    plain = to_plain(TrainConfig()) | {"trust": True}
    rows = [{"step": k, "reward": 0.5, "loss": 0.1} for k in range(4)]
    rows = source.mutate(rows, 5) if source.rng.random() < 0.5 else rows

    write(gift / "config.json", source.mutate(plain) if source.rng.random() < 0.6 else plain)
    write(gift / "env.json", source.pick(({}, [], {"device": 3}, {"packages": {"torch": None}})))
    write(gift / "metrics.jsonl", "\n".join(json.dumps(row) for row in rows))
    write(gift / "checkpoints/checkpoint-1/model.safetensors", source.bytes())
    write(gift / "checkpoints/checkpoint-1/manifest.json", source.mutate({"files": {"a": {}}}))
    for name in ("result.json", "spent.json", "before.json", "routing.json"):
        if source.rng.random() < 0.2:
            write(gift / name, source.mutate({"steps": 3, "seconds": 1, "value": {"value": 0.5}}))

    if source.rng.random() < 0.5:
        put_special(source, gift / source.pick(ENTRIES), folder.parent / "home")

    words = source.pick(COMMANDS)
    started = words[0] in ("train", "sft", "ppo", "vla", "plan")

    def work() -> None:
        if not started or source.rng.random() < 0.1:  # parsing all flags takes longest
            run(*words, str(gift), accepted=started)

        one_sentence(lambda: begin(gift))

    return work


def put_special(source: Source, path: Path, home: Path) -> None:
    """A link into the home of the user, to nothing, or to itself; or a pipe."""
    if path.is_dir():
        shutil.rmtree(path)

    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = source.pick((home / "secret", home / "new.sh", home / ".profile", home, path))
    if source.rng.random() < 0.15:
        os.mkfifo(path)
    else:
        path.symlink_to(target)


def begin(gift: Path) -> None:
    """What `train --resume` does before anything is loaded, and its first writes."""
    plan = resume_plan(settings_to_resume(TrainConfig, gift))
    with plan.open_folder("cpu", 1) as opened:
        opened.cut_after(1)
        opened.append("samples", {"step": 2, "completion": "touch ran"})
        opened.save("spent", {"seconds": 1.0})


# Data, logs and alerts


def dataset(source: Source, folder: Path) -> Work:
    rows = [{"question": f"What is {k} + 1?", "answer": str(k + 1)} for k in range(12)]
    changed = source.mutate(rows, 6)
    suffix = source.pick((".jsonl", ".json", ".csv", ".parquet", ".txt", ""))
    if suffix == ".csv":
        lines = [",".join(map(str, row.values())) for row in changed if isinstance(row, dict)]
        text = "question,answer\n" + "\n".join(lines)
    elif suffix == ".jsonl":
        text = "\n".join(json.dumps(row) for row in changed)
    else:
        text = json.dumps(changed)

    data = text.encode()
    if suffix == ".parquet" or source.rng.random() < 0.3:
        data = source.damage(data)

    file = write(folder / f"data/train{suffix}", data)
    if source.rng.random() < 0.2:
        write(folder / "data/state.json", source.value())
        write(folder / "data/dataset_info.json", source.value())

    place = source.pick((file, file.parent))
    return lambda: one_sentence(lambda: read_data(place))


def read_data(place: Path) -> None:
    load_task(TaskConfig(name="file", data=(str(place),)))


LOGS = (
    '{"step": 1, "reward": 0.5, "loss": 0.1}\n{"step": 2, "reward": 0.4, "loss": 0.2}\n',
    "step,reward,loss\n1,0.5,0.1\n2,0.4,0.2\n3,nan,inf\n",
    "step:1 - actor/entropy:0.5 - critic/rewards/mean:0.5\nstep:2 - actor/entropy:0.4\n",
    "{'loss': 0.1, 'reward': 0.5, 'epoch': 0.1}\n{'loss': nan, 'reward': 0.5, 'epoch': 0.2}\n",
    '{"log_history": [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.4}]}',
    "Epoch:[1/1](498/500), reward: 0.5, loss: 0.1\n",
)
SUFFIXES = (
    ".jsonl",
    ".json",
    ".csv",
    ".log",
    ".txt",
    ".parquet",
    ".wandb",
    ".db",
    ".gz",
    ".out",
    "",
)


def log_file(source: Source, folder: Path) -> Work:
    text = "".join(source.pick(LOGS) for _ in range(1 + source.rng.randrange(3))).encode()
    data = source.damage(text) if source.rng.random() < 0.7 else text
    name = source.pick(("log", "metrics", "trainer_state", "events.out.tfevents.1"))
    file = write(folder / f"logs/{name}{source.pick(SUFFIXES)}", data)
    if source.rng.random() < 0.2:
        write(folder / "logs/mesotron_names.json", source.value())

    place = source.pick((file, file.parent))

    def work() -> None:
        run("watch", str(place), "--json")
        if source.rng.random() < 0.2:
            run("report", str(place), "--out", str(folder / "page.html"))

    return work


KINDS = ("slack", "discord", "webhook", "ntfy", "command", "wandb", "trackio", "mail", "", "x")
TARGETS = (
    "http://127.0.0.1:9/x",
    "$HOME",
    "${NONE}",
    "touch ran",
    "file:///etc/passwd",
    "a b",
    "\0",
)


def alerts(source: Source, folder: Path) -> Work:
    """In the user's own file, and in the run folder of somebody else."""
    one = f"{source.pick(KINDS)}{source.pick((':', '', '::'))}{source.pick(TARGETS)}"
    value: Any = source.pick(([one], one, [one, one], source.value(), [source.value()]))

    own = write(folder / "own.toml", f"[watch]\nalerts = {json.dumps(value)}\n")
    plain = to_plain(TrainConfig()) | {"trust": True}
    plain["watch"]["alerts"] = value
    gift = write(folder / "gift/config.json", plain).parent
    write(gift / "env.json", {})
    (gift / "checkpoints").mkdir()

    def work() -> None:
        if source.rng.random() < 0.1:
            run("train", "--config", str(own), accepted=True)
            run("train", "--resume", str(gift), accepted=True)

        one_sentence(lambda: validate(read_own_file(own)))
        one_sentence(lambda: begin(gift))
        one_sentence(lambda: Alerts([one]))

    return work


def read_own_file(path: Path) -> TrainConfig:
    with unchecked():
        return from_plain(TrainConfig, cli.read_toml(TrainConfig, path), str(path))


@dataclass(frozen=True)
class Reader:
    prepare: Callable[[Source, Path], Work]
    what: str


READERS = {
    "models": Reader(model, "safetensors, config.json and GGUF"),
    "tokenizers": Reader(tokenizer, "tokenizer.json and tokenizer_config.json"),
    "templates": Reader(template, "chat templates"),
    "runs": Reader(run_folder, "run folders, with links and pipes in them"),
    "datasets": Reader(dataset, "JSON, JSONL, CSV, Parquet and saved datasets"),
    "logs": Reader(log_file, "logs of all formats"),
    "alerts": Reader(alerts, "alerts in TOML files and run folders"),
}


@contextlib.contextmanager
def home(root: Path) -> Iterator[None]:
    """A home with a few files, whose tree must stay as it is, as the user's own."""
    place = root / "home"
    write(place / "secret", "secret")
    write(place / ".profile", "# shell\n")
    write(place / "runs/mine/config.json", to_plain(TrainConfig()))
    before = listing(place)

    variables = {"HOME": str(place), "XDG_CACHE_HOME": str(root / "input" / "cache")}
    with mock.patch.dict(os.environ, variables):
        yield

    changed = set(before.items()) ^ set(listing(place).items())
    if changed:
        raise Traceback(f"the home has changed: {sorted(name for name, _ in changed)}")


def feed(name: str, number: int, seed: int = 0) -> None:
    """Give a reader one random input."""
    root = Path(tempfile.mkdtemp(prefix="reader-"))
    folder = root / "input"
    folder.mkdir()
    here = Path.cwd()
    try:
        os.chdir(folder)
        work = READERS[name].prepare(Source(f"{seed} {name} {number}"), folder)
        with home(root), quiet(), time_limit(fuzz.SECONDS), watcher().watching(folder):
            work()

        if (folder / "ran").exists():
            raise Traceback("code ran")
    except Traceback as error:
        raise Traceback(f"{name} {number} of seed {seed}: {error}") from error
    finally:
        os.chdir(here)
        shutil.rmtree(root, ignore_errors=True)


def warm_up() -> None:
    """Import what the readers need: an import that the time limit interrupts is left half done."""
    load(TINY_WEIGHTS)


@contextlib.contextmanager
def small_allowance() -> Iterator[None]:
    """A template without end shall not take ten seconds each time."""
    allowance = {"RENDERING_SECONDS": 0.05, "SECONDS_PER_PROMPT": 0.0}
    with mock.patch.multiple(prompts, **allowance):
        yield


def attack(args: Any, root: Path, model: Path) -> dict[str, Any]:
    failures = []
    counts = {}
    warm_up()
    with small_allowance():
        for name in READERS:
            for number in range(args.each):
                try:
                    feed(name, number, args.seed)
                except Traceback as error:
                    failures.append(str(error)[:1500])
                    say(failures[-1])

            counts[name] = args.each
            say(f"{name}: {args.each} inputs, {len(failures)} failures so far")

    return {
        "inputs": sum(counts.values()),
        "readers": len(counts),
        "by_reader": counts,
        "bad": len(failures),
        "failures": failures,
        "good": not failures,
    }
