"""Request bodies, seeded: the same bytes everywhere.

A name is SIZE_KIND: the prompt's size, and `plainN` (N tokens, no stream) or `streamN`; or
`SIZE_nested`, a stream of one event whose body is full of arrays, as many as are accepted. Each has
`VARIANTS` bodies that share no prefix.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from bench.measuring.scenarios import VARIANTS
from proxy.protocol.body import MAX_BRACKETS, MAX_COMMAS

SIZES = {
    "2k": (1_850, 1),
    "32k": (32_000, 5),
    "400k": (400_000, 9),
    "2m": (2_000_000, 9),
    "4m": (4_000_000, 9),
    "12m": (12_000_000, 9),
}
"""Characters of prompt, and messages behind the system prompt."""
_KIND = re.compile(r"(plain|stream)(\d+)")
_VOCABULARY = 4000


def write(folder: Path, names: Iterable[str]) -> None:
    """Write the bodies of these names that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(set(names)):
        for path, variant in zip(paths(folder, name), range(VARIANTS), strict=True):
            if not path.exists():
                path.write_bytes(orjson.dumps(body(name, variant)))


def paths(folder: Path, name: str) -> list[Path]:
    """Where the bodies of one name are."""
    return [folder / f"{name}_{variant}.json" for variant in range(VARIANTS)]


def body(name: str, variant: int) -> dict[str, Any]:
    """One request; no two variants begin alike."""
    size, kind = name.split("_")
    chars, turns = SIZES[size]
    if kind == "nested":
        return nested(chars, variant)
    found = _KIND.fullmatch(kind)
    if found is None:
        raise ValueError(f"no such kind of body: {kind}")
    request = {
        "model": "bench",
        "messages": messages(prompt(f"{size}{variant}", chars), turns),
        "max_tokens": int(found[2]),
        "temperature": 0.7,
    }
    return request | ({"stream": True} if found[1] == "stream" else {})


def nested(size: int, variant: int) -> dict[str, Any]:
    """A body of this size that takes as long to parse as one that is accepted can take.

    Arrays 100 deep, up to nearly `MAX_BRACKETS`, then strings of one letter, up to nearly
    `MAX_COMMAS`, then one long text.
    """
    nest: list[Any] = []
    for _ in range(99):
        nest = [nest]
    said = {"role": "user", "content": f"{variant}"}
    arrays, letters = [nest] * (MAX_BRACKETS // 100 - 1), ["a"] * (MAX_COMMAS - MAX_BRACKETS)
    text = "x" * max(1, size - 2 * MAX_BRACKETS - 4 * len(letters))
    more = {"arrays": arrays, "letters": letters, "text": text}
    return {"model": "bench", "messages": [said], "max_tokens": 1, "stream": True, "user": more}


def messages(text: str, turns: int) -> list[dict[str, str]]:
    """A quarter of the text as system prompt, the rest as a conversation."""
    head, rest = text[: len(text) // 4], text[len(text) // 4 :]
    each = max(1, len(rest) // turns)
    said = [{"role": "system", "content": head}]
    for turn in range(turns):
        role = "assistant" if turn % 2 else "user"
        said.append({"role": role, "content": rest[turn * each : (turn + 1) * each]})
    return said


def prompt(seed: str, chars: int) -> str:
    """Made-up words and sentences."""
    rng = random.Random(seed)
    words = _words()
    parts: list[str] = []
    size = 0
    while size < chars:
        parts.append(rng.choice(words) + (".\n" if rng.random() < 0.06 else ""))
        size += len(parts[-1]) + 1
    return " ".join(parts)[:chars]


def _words() -> list[str]:
    rng = random.Random(_VOCABULARY)
    return [
        "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9)))
        for _ in range(_VOCABULARY)
    ]
