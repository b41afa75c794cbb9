"""The offline bundle: what is packed for a target, and that it installs there."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from benchmarks.offline import __main__ as offline
from benchmarks.offline import install, probe
from benchmarks.offline.__main__ import Closure, Config, Target, Wheelhouse, read_size, read_target

MACHINE = {
    "python": "3.12",
    "machine": "x86_64",
    "glibc": "2.28",
}


def make_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
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
def index(tmp_path, monkeypatch):
    """The only folder that pip finds packages in."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    return folder


def walk(tmp_path, wanted: str, packages: dict | None = None, without: tuple = ()) -> Closure:
    target = read_target(MACHINE | {"packages": packages or {}})
    house = Wheelhouse(tmp_path / "wheels", target)
    closure = Closure(
        target,
        house,
        Path(),
        lambda name: None,
        without,
    )

    closure.require(Requirement(wanted), "")
    return closure


def packed(closure: Closure) -> dict[str, str]:
    wheels = []
    for need in closure.needs.values():
        if need.wheel and not need.kept:
            wheels.append(need.wheel)

    return {str(parse_wheel_filename(path.name)[0]): path.name.split("-")[1] for path in wheels}


@pytest.mark.slow
def test_keeps_what_satisfies_and_packs_the_rest(tmp_path, index):
    make_wheel(index, "outer", "2.0", ("inner>=1", "other>=3", 'never; python_version<"3"'))
    make_wheel(index, "inner", "1.5")
    make_wheel(index, "other", "3.1", ("outer[brood]",))  # a cycle
    closure = walk(tmp_path, "outer", {"inner": {"version": "1.2"}, "other": {"version": "2.9"}})

    assert packed(closure) == {"outer": "2.0", "other": "3.1"}
    assert closure.needs["inner"].kept == "1.2"
    assert closure.needs["other"].outdated == "2.9"
    assert closure.needs["other"].required_by == "outer"
    assert packed(walk(tmp_path, "outer", without=("Other",))) == {"outer": "2.0", "inner": "1.5"}


@pytest.mark.slow
def test_extras_and_requirements_of_installed_packages(tmp_path, index):
    make_wheel(index, "outer", "2.0", ('bonus; extra == "more"',))
    make_wheel(index, "bonus", "1.0")
    make_wheel(index, "forgotten", "1.0")
    there = {"bonus": {"version": "1.0", "requires": ["forgotten"]}}

    assert packed(walk(tmp_path, "outer")) == {"outer": "2.0"}
    assert packed(walk(tmp_path, "outer[more]", there)) == {"outer": "2.0", "forgotten": "1.0"}


@pytest.mark.slow
def test_a_later_requirement_revises_an_earlier_choice(tmp_path, index):
    make_wheel(index, "outer", "1.0", ("base", "picky"))
    make_wheel(index, "picky", "1.0", ("base<2",))
    make_wheel(index, "base", "1.9")
    make_wheel(index, "base", "2.4")
    closure = walk(tmp_path, "outer", {"base": {"version": "2.1"}})

    assert packed(closure) == {
        "outer": "1.0",
        "picky": "1.0",
        "base": "1.9",
    }


@pytest.mark.slow
def test_only_wheels_of_the_target_are_packed(tmp_path, index):
    for platform in ("manylinux2014_x86_64", "manylinux2014_aarch64"):
        made = make_wheel(index, "compiled", "1.0")
        made.rename(index / f"compiled-1.0-cp312-cp312-{platform}.whl")

    for machine in ("x86_64", "aarch64"):
        house = Wheelhouse(tmp_path / "wheels", Target("3.12", machine, "2.28"))
        assert house.obtain(Requirement("compiled")).name.endswith(f"{machine}.whl")

    assert "manylinux_2_28_aarch64" not in Target("3.11", "aarch64", "2.27").platforms()
    with pytest.raises(ValueError, match="absent"):
        walk(tmp_path, "absent>=2")


@pytest.mark.parametrize("wrong", [{"python": "three"}, {"machine": "../x"}, {"glibc": ""}])
def test_bad_targets_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        read_target(MACHINE | wrong)


@pytest.mark.parametrize("largest", [None, 700, 10**6])
def test_pieces_join_to_what_was_cut(tmp_path, largest):
    content = tmp_path / "content"
    bundle = tmp_path / "bundle"
    content.mkdir()
    bundle.mkdir()
    (content / "data.bin").write_bytes(bytes(range(256)) * 3)
    written = offline.write_pieces(bundle, [(content, "files/content")], largest)

    assert largest is None or all(piece["bytes"] <= largest for piece in written)
    install.install(bundle, tmp_path / "there")
    assert (tmp_path / "there/files/content/data.bin").read_bytes() == bytes(range(256)) * 3


def test_a_missing_or_damaged_piece_is_named(tmp_path):
    (tmp_path / "data").write_bytes(b"x" * 50_000)
    offline.write_pieces(tmp_path, [(tmp_path / "data", "files/data")], 20_000)
    second = tmp_path / "piece-001"
    second.write_bytes(b"y" + second.read_bytes()[1:])

    with pytest.raises(SystemExit, match="piece-001"):
        install.install(tmp_path, tmp_path / "there")

    second.unlink()
    with pytest.raises(SystemExit, match="piece-001"):
        install.install(tmp_path, tmp_path / "there")

    assert not (tmp_path / "there").exists()


def test_sizes():
    assert [read_size(text) for text in ("60", "60M", "2 GiB")] == [60, 60 * 2**20, 2**31]
    for text in ("", "M", "0", "-5M", "lots"):
        with pytest.raises(ValueError, match="--piece"):
            read_size(text)


@pytest.mark.slow
def test_a_bundle_installs_and_runs(tmp_path, index):
    """From probe to launcher: a target that lacks one package, and gets a data file too."""
    pytest.importorskip("hatchling")
    make_wheel(index, "weights_only", "1.0", ("something_huge",))
    there = json.loads(json.dumps(probe.describe()))
    make_wheel(index, "mdurl", there["packages"].pop("mdurl")["version"])
    (tmp_path / "target.json").write_text(json.dumps(there))
    (tmp_path / "model.gguf").write_bytes(b"weights" * 1000)

    config = Config(
        extras=("plot",),
        target=tmp_path / "target.json",
        piece="300K",
        bare=("weights-only",),
        files=(tmp_path / "model.gguf",),
        out=tmp_path / "bundle",
    )

    assert offline.run(config) == 0
    folder = tmp_path / "there"
    subprocess.run([sys.executable, "-I", tmp_path / "bundle" / "install.py", folder], check=True)
    site = folder / "site"

    assert (site / "mdurl.py").exists()
    assert (site / "weights_only.py").exists()
    assert not (site / "torch").exists()
    assert (folder / "files/model.gguf").read_bytes() == b"weights" * 1000

    version = subprocess.run(
        [folder / "bin/mesotron", "--version"], check=True, capture_output=True, text=True
    )
    assert version.stdout.startswith("mesotron ")
