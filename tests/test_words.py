"""Docstrings and texts of options keep to short sentences."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.config.options import Settings
from proxy.config.sources import options
from tests.test_layers import statements

ROOT = Path(__file__).parents[1]
MOST_IN_DOCSTRING, MOST_IN_OPTION = 40, 25
"""Words of a sentence."""
END = re.compile(r"(?<=[.!?])[)\"']?\s+(?=[^a-z]|[a-z-]+: )")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text; an indented paragraph is a formula or a table, and is left out."""
    for paragraph in re.split(r"\n\s*\n", text):
        if not re.search(r"^ ", paragraph, re.MULTILINE):
            yield from END.split(" ".join(paragraph.split()))


def long_ones(text: str, most: int) -> list[str]:
    return [sentence for sentence in sentences(text) if len(sentence.split()) > most]


def literal(node: ast.expr) -> str:
    """The text of a literal; what is put into it counts as a word."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(
                literal(part) if isinstance(part, ast.Constant) else "X" for part in parts
            )
        case _:
            return ""


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings, those behind a name included."""
    for node in statements(tree.body):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)), col_offset=indent):
                yield text.replace("\n" + " " * indent, "\n")
            case _:
                pass


def helps(tree: ast.Module) -> Iterator[str]:
    """The texts of argparse's options."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help":
            yield literal(node.value)


@pytest.mark.long
@pytest.mark.parametrize("package", ["proxy", "replayer", "analysis", "planner"])
def test_sentences_are_short(package):
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        written = path.read_text("utf-8")
        tree = ast.parse(written)
        long = [one for text in docstrings(tree) for one in long_ones(text, MOST_IN_DOCSTRING)]
        told = helps(tree) if "help" in written else ()
        long += [one for text in told for one in long_ones(text, MOST_IN_OPTION)]
        if long:
            found[path.relative_to(ROOT).as_posix()] = long
    assert not found


def test_texts_of_the_proxys_options_are_short():
    texts = {name: option.help for name, _, option in options(Settings)}
    assert len(texts) > 80
    assert not {name: long for name, text in texts.items() if (long := long_ones(text, 25))}
