"""The README fits a screen or two, and no page has sentences that nobody reads to the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.prose import FENCE, SPAN, faults, page_words, sentences

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = {
    page.relative_to(ROOT).as_posix(): page
    for page in (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if not page.is_relative_to(ROOT / "docs/lab")
}
NOT_YET: set[str] = set()
"""Pages that do not keep the rules yet. A page that does is taken off: the list only shrinks."""

MOST_LINES = 120
MOST_README_WORDS = 900
FIRST_COMMAND_BEFORE = 20
RANGE = re.compile(r"\d[^\S\n]*%?(?:[^\S\n]+(?:to|-)[^\S\n]+|[^\S\n]*\N{EN DASH}[^\S\n]*)\d")


def readme_faults(text: str) -> list[str]:
    """What is too much on the README, one line each."""
    said = faults(text)
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        said.append(f"{len(lines)} lines, at most {MOST_LINES}")
    if (count := page_words(text)) > MOST_README_WORDS:
        said.append(f"{count} words, at most {MOST_README_WORDS}")
    fences = [number for number, line in enumerate(lines, 1) if line.startswith("```")]
    if not fences or fences[0] + 1 >= FIRST_COMMAND_BEFORE:
        said.append(f"no command before line {FIRST_COMMAND_BEFORE}")
    ranges = RANGE.findall(SPAN.sub("", FENCE.sub("", text)))
    return [*said, *(f"a number with a range: {found}" for found in ranges)]


def found(name: str) -> list[str]:
    text = PAGES[name].read_text("utf-8")
    return readme_faults(text) if name == "README.md" else faults(text)


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read(name: str) -> None:
    # `python -m tests.support.prose PAGE` lists its long sentences.
    if name in NOT_YET:
        assert found(name), f"{name} keeps the rules: take it off NOT_YET"
    else:
        assert found(name) == []


def test_what_is_not_there_yet_is_a_page() -> None:
    assert sorted(NOT_YET - PAGES.keys()) == []


LONG = " ".join(["word"] * 41)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{LONG}.", ["41 words in a sentence", "the median"]),
        (f"- {LONG}", ["41 words in a sentence", "the median"]),
        ("A `b c d` [e f](g.md) is one. Then\nanother.", []),
        (f"```\n{LONG}\n```\n\n| {LONG} |\n\nShort.", []),
        (f"<!-- x -->\n{LONG}\n<!-- x -->\n\nShort.", []),
        ("# A\n\n" + "One two three. " * 900, ["2701 words on the page"]),
    ],
)
def test_what_is_too_long_is_found(text: str, said: list[str]) -> None:
    shown = faults(text)
    assert len(shown) == len(said)
    for line, start in zip(shown, said, strict=True):
        assert line.startswith(start)


def test_sentences_end_at_a_full_stop_only() -> None:
    text = (
        "# Head\nFirst, e.g. this: a.b 0.5 ... goes - on 1. (Second!) Third?\n- item one\n"
        "- item two\n"
    )
    assert sentences(text) == [
        *("Head", "First, e.g. this: a.b 0.5 ... goes - on 1.", "(Second!", "Third?"),
        *("item one", "item two"),
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0.78 (0.6 to 0.9)", 1),
        ("2\N{EN DASH}5 times", 1),
        ("10 % to 20 %", 1),
        ("on 2026-11-26, in `1 to 2`, up to 5, 3 - none", 0),
    ],
)
def test_a_number_with_a_range_is_found(text: str, count: int) -> None:
    said = [line for line in readme_faults(text) if line.startswith("a number with a range")]
    assert len(said) == count
