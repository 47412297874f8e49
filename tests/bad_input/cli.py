"""`python -m tests.bad_input [--variants | --drips]`: sends the corpus, prints what came of it.

`--drips`: a thousand slow heads and bodies instead, half a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import uvloop

from tests.bad_input import drips
from tests.bad_input.cases import EXPECTATIONS, cases, variants
from tests.bad_input.run import run

DRIPS = 1000


def main(arguments: list[str]) -> int:
    """Exit 1 when anything is not as it should be."""
    if "--drips" in arguments:
        return _drips()
    chosen = cases()
    if "--variants" in arguments:
        chosen += [variant for case in cases() for variant in variants(case)]
    with tempfile.TemporaryDirectory() as directory:
        result = uvloop.run(run(chosen, Path(directory)))
    for fault in result.faults():
        print(fault, file=sys.stderr)
    words = dict(zip(EXPECTATIONS, ("refused", "served", "one reply", "two replies"), strict=True))
    counts = [(word, *result.count(key)) for key, word in words.items()]
    print(", ".join(f"{word} {met}/{of}" for word, met, of in counts))
    print(f"reached the engine: {len(result.leaked)}, logged amiss: {len(result.log)}")
    return 1 if result.faults() else 0


def _drips() -> int:
    drips.raise_file_limit()
    with tempfile.TemporaryDirectory() as directory:
        found = uvloop.run(drips.run(DRIPS, Path(directory)))
    print(found)
    late = max(found.head_s) > 10.5 or max(found.body_s) > 31
    return 1 if late or set(found.beside) != {200} else 0
