"""The site of `make docs`: its order of pages, its links, and the map in docs/llms.txt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from docs.pages import BESIDE, DOCS, DOORS, ROOT, map_of_pages, on_page_markdown, pages_of

MOST_PAGES = 12
MORE = {"concepts": 16}
"""Folders with more pages: one per idea."""


def test_the_map_has_every_page() -> None:
    # To renew it: python -m docs.pages
    text = (DOCS / "llms.txt").read_text("utf-8")
    assert text == map_of_pages()
    for page in DOCS.rglob("*.md"):
        assert f"]({page.relative_to(DOCS).as_posix()})" in text


def test_every_folder_is_a_door() -> None:
    folders = {path.name for path in DOCS.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders <= set(DOORS)
    for folder in folders:
        assert len([*(DOCS / folder).glob("*.md")]) <= MORE.get(folder, MOST_PAGES), folder


def test_a_folder_begins_with_its_index() -> None:
    for door in ("try", "deploy", "operate", "reference"):
        first, *others = pages_of(door)
        assert first.name == "README.md"
        text = first.read_text("utf-8")
        for page in others:
            assert f"]({page.name}" in text, page


def test_what_the_site_has_from_outside_is_there() -> None:
    assert all((ROOT / name).is_file() for name in BESIDE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("here", "written", "shown"),
    [
        ("index.md", "[a](docs/reference/options.md#fleet)", "[a](reference/options.md#fleet)"),
        ("index.md", "[a](LICENSE) [b](#c)", "[a](project/LICENSE.md) [b](#c)"),
        ("index.md", '<img src="docs/chart.svg">', '<img src="chart.svg">'),
        ("index.md", "`[a](LICENSE)`", "`[a](LICENSE)`"),
        ("operate/x.md", "[a](../../configs/alerts.yml)", "[a](../project/configs/alerts.yml.md)"),
        ("operate/x.md", "- a\n\n  ```\n  b\n  ```\nc", "- a\n\n    ```\n    b\n    ```\nc"),
        ("operate/x.md", "```\na\n\n  b\n```\n", "```\na\n\n  b\n```\n"),
        ("operate/x.md", "[a](../../README.md#b)", "[a](../index.md#b)"),
        ("operate/x.md", "[a](../reference/http-api.md)", "[a](../reference/http-api.md)"),
        ("operate/x.md", "[a](https://example.com/b)", "[a](https://example.com/b)"),
        ("project/CHANGELOG.md", "[a](docs/llms.txt)", "[a](../llms.txt)"),
    ],
)
def test_links_lead_where_the_site_has_the_file(here: str, written: str, shown: str) -> None:
    page = cast(Any, SimpleNamespace(file=SimpleNamespace(src_uri=here)))
    assert on_page_markdown(written, page=page) == shown
