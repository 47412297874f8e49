"""The documented table of request fields: what becomes of each in the prefill leg."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http-api.md"


def documented() -> dict[str, str]:
    """Each field's treatment, by its name."""
    table = PAGE.read_text("utf-8").split("<!-- fields -->")[1]
    rows = re.findall(r"^\| (`.+?`) \| ([a-z ]+) \|", table, re.MULTILINE)
    return {name: done for names, done in rows for name in re.findall(r"`([^`]+)`", names)}
