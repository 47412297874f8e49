"""Every link between the documents leads to a file, and to a heading, that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^()\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def links(page):
    return LINK.findall(CODE.sub("", page.read_text("utf-8")))


def anchors(page):
    """The names that GitHub gives the headings of a page."""
    titles = HEADING.findall(FENCE.sub("", page.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page):
    for link in links(page):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_the_readme():
    linked = {link.partition("#")[0] for link in links(ROOT / "README.md")}
    missing = {page.relative_to(ROOT).as_posix() for page in PAGES} - linked - {"README.md"}
    assert not missing


def test_the_pictures_have_their_ends():
    for page in PAGES:
        assert page.read_text("utf-8").count("```") % 2 == 0, page
