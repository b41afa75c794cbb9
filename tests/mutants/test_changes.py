"""The changes that `make mutants` draws from."""

import ast

import pytest

from mutants.changes import changes_of

SOURCE = '''"""A docstring of 3 words."""

LIMIT = 5


class Meter:
    width: int = 2

    def grow(self, by, *, most=9):
        """Adds 1 to nothing."""
        if by < 0 and not self.done:
            raise ValueError(f"by={by + 1} must be above 0")

        log.warning("grew by %d", by * 2)
        self.width += by
        self.note(by, "ü", most)
        return min(self.width, most)
'''


@pytest.fixture
def changes(tmp_path):
    (tmp_path / "meter.py").write_text(SOURCE, encoding="utf-8")
    return changes_of(tmp_path, "meter.py")


def test_each_is_valid_python_and_another_program(changes):
    programs = {ast.dump(ast.parse(change.apply(SOURCE.encode()))) for change in changes}
    assert ast.dump(ast.parse(SOURCE)) not in programs
    assert len(programs) == len(changes)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("5", "6"),
        ("9", "18"),
        ("by < 0", "(by <= 0)"),
        ("by < 0", "(by > 0)"),
        ("by < 0 and not self.done", "(by < 0 or not self.done)"),
        ("by < 0 and not self.done", "(by < 0)"),
        ("not self.done", "(self.done)"),
        ("self.width += by", "pass"),
        ("min", "max"),
        ('self.note(by, "ü", most)', "(self.note('ü', by, most))"),
        ('self.note(by, "ü", most)', "pass"),
        ('raise ValueError(f"by={by + 1} must be above 0")', "pass"),
    ],
)
def test_it_has(changes, before, after):
    assert (before, after) in {(change.before, change.after) for change in changes}


def test_words_for_people_are_left_out(changes):
    lines = SOURCE.splitlines()
    touched = {lines[change.line - 1].strip() for change in changes}
    assert not any("docstring" in line or "Adds" in line or "log." in line for line in touched)
    assert all(change.before != "by + 1" for change in changes)


def test_each_names_the_function_around_it(changes):
    functions = {change.before: change.function for change in changes}
    assert functions["5"] == ""
    assert functions["2"] == "Meter"
    assert functions["self.width += by"] == "Meter.grow"
