"""`mesotron bundle`: what is packed for a machine without network, and that it installs there."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from mesotron.bundle import install, probe
from mesotron.bundle.closure import Closure
from mesotron.bundle.pieces import read_size, write_pieces
from mesotron.bundle.target import Target, from_plain
from mesotron.bundle.wheels import Wheelhouse, pack_own, requirements_of
from mesotron.cli import main


def make_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """A pure wheel with one module that knows its version."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder that is all of pip's world."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def walk(tmp_path, wanted: str, packages: dict | None = None) -> Closure:
    plain = {"python": "3.12", "machine": "x86_64", "glibc": "2.28", "packages": packages or {}}
    target = from_plain(plain, "test")
    closure = Closure(target, Wheelhouse(tmp_path / "wheels", target), {})
    closure.meet(Requirement(wanted), "")
    return closure


def packed(closure: Closure) -> dict[str, str]:
    wheels = [need.wheel for need in closure.needs.values() if need.wheel and not need.kept]
    return {str(parse_wheel_filename(path.name)[0]): path.name.split("-")[1] for path in wheels}


def test_keeps_what_serves_and_packs_the_rest(tmp_path, shelf):
    make_wheel(shelf, "outer", "2.0", ("inner>=1", "other>=3", 'never; python_version<"3"'))
    make_wheel(shelf, "inner", "1.5")
    make_wheel(shelf, "other", "3.1")
    there = {"inner": {"version": "1.2"}, "other": {"version": "2.9"}}
    closure = walk(tmp_path, "outer", there)
    assert packed(closure) == {"outer": "2.0", "other": "3.1"}
    assert closure.needs["inner"].kept == "1.2"
    assert closure.needs["other"].outdated == "2.9"
    assert closure.needs["other"].asked_by == "outer"


def test_extras_and_what_installed_packages_ask_for(tmp_path, shelf):
    make_wheel(shelf, "outer", "2.0", ('bonus; extra == "more"',))
    make_wheel(shelf, "bonus", "1.0")
    make_wheel(shelf, "forgotten", "1.0")
    there = {"bonus": {"version": "1.0", "requires": ["forgotten"]}}
    assert packed(walk(tmp_path, "outer")) == {"outer": "2.0"}
    assert packed(walk(tmp_path, "outer[more]", there)) == {"outer": "2.0", "forgotten": "1.0"}


def test_a_later_requirement_changes_an_earlier_choice(tmp_path, shelf):
    make_wheel(shelf, "outer", "1.0", ("base", "picky"))
    make_wheel(shelf, "picky", "1.0", ("base<2",))
    make_wheel(shelf, "base", "1.9")
    make_wheel(shelf, "base", "2.4")
    closure = walk(tmp_path, "outer", {"base": {"version": "2.1"}})
    assert packed(closure) == {"outer": "1.0", "picky": "1.0", "base": "1.9"}
    assert len(list((tmp_path / "wheels").glob("base-*"))) == 1


def test_wheels_of_another_machine_are_not_packed(tmp_path, shelf):
    for place in ("manylinux2014_x86_64", "manylinux2014_aarch64"):
        made = make_wheel(shelf, "compiled", "1.0")
        made.rename(shelf / f"compiled-1.0-cp312-cp312-{place}.whl")
    for machine in ("x86_64", "aarch64"):
        target = Target("3.12", machine, "2.28")
        found = Wheelhouse(tmp_path / "wheels", target).obtain(Requirement("compiled"))
        assert found.name.endswith(f"{machine}.whl")


def test_requirements_in_a_circle_end(tmp_path, shelf):
    make_wheel(shelf, "hen", "1.0", ("egg",))
    make_wheel(shelf, "egg", "1.0", ("hen[brood]",))
    assert packed(walk(tmp_path, "hen")) == {"hen": "1.0", "egg": "1.0"}


def test_what_cannot_be_had_is_named(tmp_path, shelf):
    with pytest.raises(ValueError, match=r"no wheel of absent>=2 for Python 3.12 on x86_64"):
        walk(tmp_path, "absent>=2")


def test_the_walk_agrees_with_an_environment_that_works():
    """Nothing is missing where all of mesotron's tests run."""
    plain = json.loads(json.dumps(probe.describe()))
    target = from_plain(plain, "here")
    own = [Requirement(line) for line in plain["packages"]["mesotron"]["requires"]]

    class Nothing:
        def obtain(self, wanted):
            raise AssertionError(f"{wanted} is taken to be missing")

    closure = Closure(target, Nothing(), {"mesotron": own})  # type: ignore[arg-type]
    closure.meet(Requirement("mesotron[rlvr,ppo,plot]"), "")
    assert {"torch", "trl", "numpy", "markdown-it-py"} <= set(closure.needs)


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ([], "holds no table"),
        ({"python": "three", "glibc": "2.28", "machine": "x86_64"}, "'three'"),
        ({"python": "3.12", "glibc": "2.28", "machine": "../x"}, "'../x'"),
        ({"python": "3.12", "glibc": "", "machine": "x86_64"}, "glibc as ''"),
    ],
)
def test_a_target_that_is_none(plain, words):
    with pytest.raises(ValueError, match=words):
        from_plain(plain, "target.json")


def test_a_package_described_unlike_pip_does():
    machine = {"python": "3.12", "glibc": "2.28", "machine": "x86_64"}
    for value in ("1.0", {"version": "one"}, {"version": "1", "requires": ["a b c"]}):
        with pytest.raises(ValueError, match="describes torch in a way"):
            from_plain({**machine, "packages": {"torch": value}}, "target.json")


@pytest.mark.parametrize("largest", [None, 1, 700, 10**6])
def test_pieces_join_to_what_was_cut(tmp_path, largest, capsys):
    content = tmp_path / "content"
    content.mkdir()
    (content / "data.bin").write_bytes(bytes(range(256)) * 3)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    written = write_pieces(bundle, [(content, "files/content")], largest)
    assert largest is None or all(piece["bytes"] <= largest for piece in written)
    install.install(bundle, tmp_path / "there")
    assert (tmp_path / "there/files/content/data.bin").read_bytes() == bytes(range(256)) * 3


def test_a_piece_that_is_missing_or_damaged_is_named(tmp_path):
    (tmp_path / "data").write_bytes(b"x" * 50_000)
    write_pieces(tmp_path, [(tmp_path / "data", "files/data")], 20_000)
    second = tmp_path / "piece-001"
    second.write_bytes(b"y" + second.read_bytes()[1:])
    with pytest.raises(SystemExit, match="piece-001 is damaged"):
        install.install(tmp_path, tmp_path / "there")
    second.unlink()
    with pytest.raises(SystemExit, match="piece-001 has not arrived"):
        install.install(tmp_path, tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("words", ["60", "60M", "1.5G", "2 GiB"])
def test_sizes(words):
    assert read_size(words) >= 60


@pytest.mark.parametrize("words", ["", "M", "0", "-5M", "lots"])
def test_sizes_that_are_none(words):
    with pytest.raises(ValueError, match="is no size"):
        read_size(words)


def test_own_wheel_is_the_package(tmp_path):
    path = pack_own(tmp_path)
    first = path.read_bytes()
    assert pack_own(tmp_path).read_bytes() == first
    assert any(one.name == "torch" for one in requirements_of(path))
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        assert "mesotron/cli.py" in names
        assert not any("__pycache__" in name for name in names)
        assert wheel.testzip() is None


def test_a_bundle_installs_and_runs_there(tmp_path, shelf, capsys):
    """From probe to launcher: a target that lacks one package, and gets a piece of data too."""
    make_wheel(shelf, "weights_only", "1.0", ("something_huge",))
    there = json.loads(json.dumps(probe.describe()))
    version = there["packages"].pop("mdurl")["version"]
    make_wheel(shelf, "mdurl", version)
    (tmp_path / "target.json").write_text(json.dumps(there))
    (tmp_path / "model.gguf").write_bytes(b"weights" * 1000)
    words = ["bundle", "plot", "--target", str(tmp_path / "target.json"), "--piece", "300K"]
    words += ["--bare", "weights-only", "--files", str(tmp_path / "model.gguf")]
    assert main([*words, "--out", str(tmp_path / "bundle")]) == 0
    said = capsys.readouterr().out
    assert "fetching mdurl" in said
    assert "fetching torch" not in said
    script = tmp_path / "bundle" / "install.py"
    folder = tmp_path / "there"
    subprocess.run([sys.executable, "-I", script, folder], check=True, capture_output=True)
    site = folder / "site"
    assert (site / "mdurl.py").exists()
    assert (site / "weights_only.py").exists()
    assert (folder / "files/model.gguf").read_bytes() == b"weights" * 1000
    program = "import mesotron, sys; print(mesotron.__file__)"
    launcher = (folder / "bin/mesotron").read_text().split("from mesotron")[0]
    shown = subprocess.run(
        [sys.executable, "-I", "-c", launcher + program], check=True, capture_output=True, text=True
    )
    assert Path(shown.stdout.strip()).is_relative_to(site)
    version = subprocess.run(
        [folder / "bin/mesotron", "--version"], check=True, capture_output=True, text=True
    )
    assert version.stdout.startswith("mesotron ")


def test_the_probe_runs_on_any_python(capsys):
    assert main(["bundle", "--probe"]) == 0
    script = capsys.readouterr().out
    shown = subprocess.run(
        [sys.executable, "-I", "-c", script], check=True, capture_output=True, text=True
    )
    assert "torch" in from_plain(json.loads(shown.stdout), "probe").packages


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "no part 'nope'"),
        (["--piece", "big"], "'big' is no size"),
        (["--files", "absent.gguf"], "absent.gguf does not exist"),
    ],
)
def test_wrong_words(tmp_path, words, said, capsys):
    assert main(["bundle", *words, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_platforms_of_an_old_machine():
    assert "manylinux_2_28_aarch64" not in Target("3.11", "aarch64", "2.27").platforms()
