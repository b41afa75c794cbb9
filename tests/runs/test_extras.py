"""Which packages are there, and what is said of those that are not."""

import pytest

from mesotron.runs.extras import is_installed, require


def test_a_name_is_found_or_not():
    assert is_installed("json")
    assert is_installed("json.decoder")
    assert not is_installed("no_such_package")
    assert not is_installed("no_such_package.part")


def test_what_is_missing_is_named_with_the_command():
    require(None, ["json"], "this")
    with pytest.raises(
        ValueError, match=r"^this needs no_such_package: pip install no_such"
    ) as one:
        require(None, ["json", "no_such_package"], "this")
    assert "json" not in str(one.value).partition("needs")[2]

    with pytest.raises(ValueError, match=r"mesotron\[rlvr\]"):
        require("rlvr", ["no_such_package"], "this")
