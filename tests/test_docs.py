"""Every link between the documents leads to a file, and to a heading, that is there."""

import re
from pathlib import Path

import pytest

from tests.test_layers import DIRECTIONS

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


def marked(page, mark):
    """The code block between two marks of a page."""
    parts = (ROOT / page).read_text("utf-8").split(f"<!-- {mark} -->")
    assert len(parts) == 3, f"{page} needs a block between two <!-- {mark} --> lines"
    return parts[1].strip().removeprefix("```").removesuffix("```").strip("\n")


def test_the_tree_has_every_module():
    drawn: set[str] = set()
    above: list[str] = []
    for line in marked("docs/architecture.md", "tree").splitlines():
        name = line.split()[0]
        del above[(len(line) - len(line.lstrip())) // 2 :]
        drawn.add("".join((*above, name)))
        above.append(name)
    modules = {
        path.relative_to(ROOT).as_posix()
        for top in ("proxy", "replayer", "analysis")
        for path in (ROOT / top).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert not modules - drawn


def test_the_directions_are_those_that_are_checked():
    rows = dict(
        line.split(": ", 1) for line in marked("docs/architecture.md", "directions").splitlines()
    )
    assert rows == DIRECTIONS
