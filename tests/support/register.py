"""The register of docs/contribute/register.md: every module with a sentence, from its docstring.

Directions of imports are those that tests/test_layers.py checks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.glossary import table
from tests.test_layers import BETWEEN, DIRECTIONS, EXCEPTIONS, MOST_CHAINED, MOST_ENTRIES, ROOT

TOPS = ("proxy", "replayer", "analysis", "planner", "plugins/vllm-thermal/vllm_thermal")


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line, for a table's cell."""
    said = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert said, f"{path.relative_to(ROOT)} has no docstring"
    paragraph = " ".join(said.partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z)`\]]\.) ", paragraph)[0].replace("|", "\\|")


def directions() -> str:
    """A table for each part whose order of imports is checked, and the limits beside them."""
    parts = [
        f"### Inside `{package}`\n\n{table(('layer', 'parts'), *_layers(order))}"
        for package, order in DIRECTIONS.items()
    ]
    between = [
        (f"`{package}`", ", ".join(f"`{name}`" for name in names) or "nothing")
        for package, names in BETWEEN.items()
    ]
    between += [
        (f"`{name}`, beside that", ", ".join(f"`{other}`" for other in others))
        for name, others in EXCEPTIONS.items()
    ]
    limits = [
        ("modules and packages in one folder", str(MOST_ENTRIES)),
        ("modules on the longest chain of imports", str(MOST_CHAINED)),
    ]
    parts.append(f"### Between the packages\n\n{table(('package', 'imports'), *between)}")
    parts.append(f"### Limits\n\n{table(('limit', 'most'), *limits)}")
    return "\n\n".join(parts)


def _layers(order: str) -> Iterator[tuple[str, str]]:
    for number, layer in enumerate(order.split("|"), 1):
        yield str(number), ", ".join(f"`{part.strip()}`" for part in layer.split(","))


def modules() -> str:
    """A section for each folder: its sentence, and a table of its modules."""
    return "\n\n".join(_folder(folder) for top in TOPS for folder in _folders(ROOT / top))


def _folders(top: Path) -> list[Path]:
    return sorted({path.parent for path in top.rglob("*.py")})


def _folder(folder: Path) -> str:
    name = folder.relative_to(ROOT).as_posix()
    parts = [f"### `{name}/`"]
    if (package := folder / "__init__.py").is_file():
        parts.append(first_sentence(package))
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    if rows := [(f"`{path.name}`", first_sentence(path)) for path in files]:
        parts.append(table(("module", "what it is"), *rows))
    return "\n\n".join(parts)
