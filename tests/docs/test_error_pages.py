"""Every code that the source can give has a page in docs/errors, and the page's example gives what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.page import printed, read_page

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "errors").glob("[EW]*.md"))


def codes_in_source() -> set[str]:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py")]
    return {code for text in texts for code in re.findall(r"\"([EW]\d{4})\"", text)}


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    codes, pages = codes_in_source(), {page.stem for page in PAGES}
    assert not codes - pages, f"codes without a page in docs/errors: {sorted(codes - pages)}"
    assert not pages - codes, f"pages of codes that the source does not know: {sorted(pages - codes)}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_example_gives_what_the_page_shows(path: Path, tmp_path: Path, update_golden: bool) -> None:
    page = read_page(path)
    got = printed(page, tmp_path)
    assert f"[{path.stem}]" in got, got
    if update_golden:
        path.write_text(page.with_shown(got), encoding="utf-8")
    else:
        assert got == page.shown
