"""`python -m tests.bad_input [--variants]`: sends the corpus and prints what came of it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import uvloop

from tests.bad_input.cases import EXPECTATIONS, cases, variants
from tests.bad_input.run import run


def main(arguments: list[str]) -> int:
    """Exit 1 when anything is not as it should be."""
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
