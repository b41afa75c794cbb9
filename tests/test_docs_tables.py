"""The tables of the pages are those that `python docs/tables.py` writes."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TABLES = runpy.run_path(str(DOCS / "tables.py"))
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "<!-- table:" in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_follow_from_the_package(page):
    text = page.read_text()
    assert TABLES["fill"](text) == text, "run: python docs/tables.py"


def test_every_table_is_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    for name in TABLES["TABLES"]:
        assert f"<!-- table: {name} -->" in text
