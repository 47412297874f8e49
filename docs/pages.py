"""Makes the site of `make docs` from the pages as GitHub shows them: hooks of mkdocs.

The README is the front page. A link to a file outside docs/ leads to a page that shows that file.
`python -m docs.pages` renews docs/llms.txt, a map of the pages in one sentence each.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOORS = ("try", "deploy", "operate", "reference", "concepts", "benchmarks", "contribute", "lab")
"""The folders of docs/ in the order in which the site shows them."""
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Pages outside docs/ that the site lists, too."""

STYLE = """
.md-grid { max-width: 76rem; }
.md-typeset table:not([class]) th { min-width: 0; }
.md-typeset table:not([class]) :is(th, td) { padding: .6em .8em; }
@media (min-width: 60em) { .md-typeset table:not([class]) td:first-child { min-width: 7.5rem; } }
.md-typeset table:has(th:nth-child(4)) td:first-child > code:only-child { white-space: nowrap; }
.md-typeset table:has(th:nth-child(6)):has(td:first-child > code) td:nth-child(4) {
  overflow-wrap: anywhere; min-width: 6rem;
}
.md-typeset table:has(th:nth-child(6)):has(td:first-child > code) td:last-child {
  min-width: 12rem;
}
"""
"""Wide tables: names stay in one piece, and what explains them has room."""

LINK = re.compile(
    r"(?P<code>^ *```.*?^ *```|(`+)[^`].*?\2)|\]\((?P<link>[^()\s]+)\)", re.MULTILINE | re.DOTALL
)
FILE_IN_HTML = re.compile(r'(?<=["\s,])docs/(?=[\w/-]+\.(?:svg|png)\b)')
LOADED = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href|srcset)="https?://')
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
SENTENCE = re.compile(r"(?:.(?!(?<!e\.g)(?<!i\.e)[.!?]\s))*.[.!?]?", re.DOTALL)


def pages_of(door: str) -> list[Path]:
    """Return a folder's pages: its README.md, what that links in its order, then the rest."""
    folder = DOCS / door
    index = folder / "README.md"
    first = [folder / name for name in _links(index)] if index.exists() else []
    every = [index, *first, *sorted(folder.glob("*.md"))]
    return [page for page in dict.fromkeys(every) if page.exists() and page.parent == folder]


def map_of_pages() -> str:
    """Return docs/llms.txt: every page of docs/ with its first sentence, by folder."""
    lines = ["# cache-proxy", "", f"> {_first_sentence(ROOT / 'README.md')}"]
    for title, pages in _sections():
        lines += ["", f"## {title}", ""]
        for page in pages:
            name, said = page.relative_to(DOCS).as_posix(), _first_sentence(page)
            lines.append(f"- [{_title(page)}]({name})" + (f": {said}" if said else ""))
    return "\n".join(lines) + "\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Order the pages, and name headings as GitHub does."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    sections = [
        {title: [page.relative_to(DOCS).as_posix() for page in pages]}
        for title, pages in _sections()
    ]
    config.extra_css = ["site.css"]
    config.nav = [{"Home": "index.md"}, *sections, {"Project": [f"project/{n}" for n in BESIDE]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and a page for each file outside docs/ that a page links."""
    from mkdocs.structure.files import File, InclusionLevel

    files.append(File.generated(config, "site.css", content=STYLE))
    for path in sorted(_outside()):
        content = path.read_text("utf-8")
        if path.suffix != ".md":
            title = path.relative_to(ROOT)
            fence = f"````{path.suffix[1:] if path.suffix != '.service' else 'ini'}"
            content = f"---\nsearch: {{exclude: true}}\n---\n# {title}\n\n{fence}\n{content}````\n"
        listed = path.name in ("README.md", *BESIDE) and path.parent == ROOT
        level = InclusionLevel.INCLUDED if listed else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, _place(path), content=content, inclusion=level))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Lead each relative link to where the site has the file."""
    here = page.file.src_uri
    path = next((path for path in _outside() if _place(path) == here), DOCS / here)

    def moved(link: str) -> str:
        name, hash_, anchor = link.partition("#")
        if not name or ":" in name:
            return link
        target = (path.parent / name).resolve()
        target = target / "README.md" if target.is_dir() else target
        return os.path.relpath(_place(target), Path(here).parent) + hash_ + anchor

    if path.suffix != ".md":
        return markdown
    shown = _with_links(_in_lists(markdown), moved)
    return FILE_IN_HTML.sub("", shown) if path.parent == ROOT else shown


def on_post_build(config: MkDocsConfig) -> None:
    """Fail where a page loads from another host; put the pages as they were written beside."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        found = LOADED.search(page.read_text("utf-8"))
        if found:
            raise SystemExit(f"{page.relative_to(site)} loads from another host: {found[0]}")
    for page in DOCS.rglob("*.md"):
        shutil.copyfile(page, site / page.relative_to(DOCS))


def _sections() -> Iterator[tuple[str, list[Path]]]:
    """Titles of the site's parts with their pages."""
    for door in DOORS:
        if pages := pages_of(door):
            yield door.capitalize(), pages
    yield "Architecture", sorted(DOCS.glob("*.md"))


def _outside() -> set[Path]:
    """The README, and what is linked outside docs/ from pages, directly or over such files."""
    found = {ROOT / "README.md", *(ROOT / name for name in BESIDE)}
    ahead = [*found, *DOCS.rglob("*.md")]
    while ahead:
        page = ahead.pop()
        for name in _links(page) if page.suffix == ".md" else ():
            target = (page.parent / name).resolve()
            target = target / "README.md" if target.is_dir() else target
            if target.is_file() and not target.is_relative_to(DOCS) and target not in found:
                found.add(target)
                ahead.append(target)
    return found


def _place(path: Path) -> str:
    """Where the site has a file of the project."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    return f"project/{name}" if path.suffix == ".md" else f"project/{name}.md"


def _links(page: Path) -> list[str]:
    """The relative links of a page, without their anchors."""
    found = [match["link"] for match in LINK.finditer(page.read_text("utf-8")) if match["link"]]
    return [name for link in found if ":" not in (name := link.partition("#")[0]) and name]


def _in_lists(text: str) -> str:
    """The same with blocks of list items where mkdocs looks for them: at four blanks, not two."""
    shown: list[str] = []
    more, is_code, was_blank = 0, False, False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        indent = len(line) - len(line.lstrip())
        if line.strip() and not is_code:
            if indent == 0:
                more = 0
            elif was_blank and indent in (2, 3):
                more = 4 - indent
        was_blank = not line.strip()
        shown.append(line if was_blank or is_code else " " * more + line)
    return "\n".join(shown) + "\n" * text.endswith("\n")


def _with_links(text: str, moved: Callable[[str], str]) -> str:
    def written(match: re.Match[str]) -> str:
        return str(match[0]) if match["code"] else f"]({moved(match['link'])})"

    return LINK.sub(written, text)


def _title(page: Path) -> str:
    return str(TITLE.findall(page.read_text("utf-8"))[0]).replace("`", "")


def _first_sentence(page: Path) -> str:
    """The first sentence below the title, if a paragraph stands there."""
    block = TITLE.split(page.read_text("utf-8"), maxsplit=1)[-1].strip().split("\n\n")[0]
    if block.startswith(("#", "|", "```", "- ", "<")):
        return ""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.replace("**", "").split()))
    found = SENTENCE.match(plain)
    return found[0].rstrip(":") if found else ""


if __name__ == "__main__":
    (DOCS / "llms.txt").write_text(map_of_pages(), "utf-8")
