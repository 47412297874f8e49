"""How long the sentences of a page are; `python -m tests.support.prose PAGE ...` lists the longest.

A sentence is what stands between two full stops of a paragraph. A heading and an item of a list are
sentences of their own. Code, tables and what a command generated (between two `<!-- x -->` marks)
are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import median

MARKED = re.compile(r"<!-- ([^>]+) -->.*?<!-- \1 -->", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(`+)[^`].*?\1", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
TAG = re.compile(r"</?[a-z][^>]*>")
STARTS = re.compile(r"^\s*(#+ |[-*+] |\d+\. |> ?)")
STOP = re.compile(r"(?<=[.!?])(?<!\.\.)(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)[\"')\]*]*\s+")
WORD = re.compile(r"\S*\w\S*")

MOST_WORDS = 40
MOST_MEDIAN = 18
MOST_ON_A_PAGE = 2500


def written(text: str) -> str:
    """Return a page without what a command generated."""
    return COMMENT.sub("", MARKED.sub("", text))


def words_of(text: str) -> int:
    """Return how many words a text has; a link counts by its words, a span of code as one."""
    plain = LINK.sub(r"\1", SPAN.sub("code", TAG.sub(" ", text)))
    return len(WORD.findall(plain))


def page_words(text: str) -> int:
    """Return the words of a page, tables and code included, generated parts left out."""
    return len(WORD.findall(LINK.sub(r"\1", written(text))))


def _units(text: str) -> Iterator[str]:
    """Paragraphs, headings and items of lists, each in one line."""
    lines = [line.rstrip() for line in FENCE.sub("\n\n", written(text)).splitlines()]
    shown = ["" if line.lstrip().startswith("|") else line for line in lines]
    for is_blank, block in groupby(shown, key=lambda line: not line.strip()):
        unit: list[str] = []
        for line in () if is_blank else block:
            if STARTS.match(line) and unit:
                yield " ".join(unit)
                unit = []
            heading = line.startswith("#")
            unit.append(STARTS.sub("", line, count=1).strip())
            if heading:
                yield " ".join(unit)
                unit = []
        if unit:
            yield " ".join(unit)


def sentences(text: str) -> list[str]:
    """Return the sentences of a page in their order."""
    found = []
    for unit in _units(text):
        plain = LINK.sub(r"\1", SPAN.sub("code", TAG.sub(" ", unit)))
        found += [part for part in STOP.split(plain) if WORD.search(part)]
    return found


def faults(text: str) -> list[str]:
    """Return what is too long on a page, one line each."""
    lengths = {sentence: words_of(sentence) for sentence in sentences(text)}
    said = [
        f"{count} words in a sentence, at most {MOST_WORDS}: {sentence[:70]}..."
        for sentence, count in lengths.items()
        if count > MOST_WORDS
    ]
    middle = median([words_of(sentence) for sentence in sentences(text)] or [0])
    if middle > MOST_MEDIAN:
        said.append(f"the median sentence has {middle:g} words, at most {MOST_MEDIAN}")
    if (count := page_words(text)) > MOST_ON_A_PAGE:
        said.append(f"{count} words on the page, at most {MOST_ON_A_PAGE}")
    return said


def main() -> None:
    """Print the faults and the longest sentences of pages."""
    for name in sys.argv[1:]:
        text = Path(name).read_text("utf-8")
        middle = median([words_of(sentence) for sentence in sentences(text)] or [0])
        sys.stdout.write(f"== {name}: {page_words(text)} words, median {middle:g}\n")
        for fault in faults(text):
            sys.stdout.write(f"   ! {fault}\n")
        for sentence in sorted(sentences(text), key=words_of, reverse=True):
            if words_of(sentence) > 25:
                sys.stdout.write(f"   {words_of(sentence):3} {sentence}\n")


if __name__ == "__main__":
    main()
