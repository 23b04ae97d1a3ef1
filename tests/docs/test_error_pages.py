"""Every code that the source can give has a page in docs/errors, and the page's example gives what the page shows."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from meshwright.build import compile
from tests.docs.page import printed, read_page
from tests.golden.test_broken_plans import SMALL

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "errors").glob("[EW]*.md"))


def codes_in_source() -> set[str]:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py")]
    return {code for text in texts for code in re.findall(r"\"([EW]\d{4})\"", text)}


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    codes, pages = codes_in_source(), {page.stem for page in PAGES}
    assert not codes - pages, f"codes without a page in docs/errors: {sorted(codes - pages)}"
    assert not pages - codes, f"pages of codes that the source does not know: {sorted(pages - codes)}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every example finds: ``small.mw``, and ``build``, that file compiled for two ranks."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "small.mw").write_text(SMALL, encoding="utf-8")
    compile(str(folder / "small.mw"), "fsdp=2", output=folder / "build")
    return folder


@pytest.mark.usefixtures("imports_forgotten")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_example_gives_what_the_page_shows(
    path: Path,
    prepared: Path,
    tmp_path: Path,
    update_golden: bool,
    monkeypatch: pytest.MonkeyPatch,
    imports_forgotten: None,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder of a factory is added to it
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    page = read_page(path)
    got = elsewhere(printed(page, tmp_path), tmp_path)
    assert f"[{path.stem}]" in got, got
    if update_golden:
        path.write_text(page.with_shown(got), encoding="utf-8")
    else:
        assert got == page.shown


def elsewhere(text: str, folder: Path) -> str:
    """The text as it is on every machine and day."""
    text = text.replace(f"{folder}/", "").replace(torch.__version__, torch.__version__.partition("+")[0])
    text = re.sub(r"raised on rank \d+", "raised on rank 0", text)  # the first of several that fail alike
    return re.sub(r"(meshwright-fault-)\d+-\d+", r"\1DATE-TIME", text)


def test_the_list_of_pages_is_whole() -> None:
    listed = (ROOT / "docs" / "errors" / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        title = page.read_text(encoding="utf-8").splitlines()[0].partition(": ")[2]
        assert f"| [{page.stem}]({page.name}) | {title} |" in listed
