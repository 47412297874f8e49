"""The corpus: raw requests in `data/*.toml`, and variants of each that mean the same.

Bytes are written as text with Python's escapes. `{{body}}` is a good body, `{{len}}` and
`{{hexlen}}` its length, `{{head}}` the usual headers with a canary among them, `{{size}}` the
length of a case's `x`, `{{text*9}}` nine times the text, `{{pause}}` the end of a segment.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
CANARY = "sk-canary-7f3a91"
BODY = '{"model":"sim-8b","messages":[{"role":"user","content":"hi"}],"max_tokens":2}'
EXPECTATIONS = ("refuse", "serve", "one_reply", "two_replies")
SEED = 20
BYTE_BY_BYTE = 500
"""Longer ones are not sent so: it takes long."""
_HEAD = f"Host: proxy\\r\\nAuthorization: Bearer {CANARY}\\r\\nContent-Type: application/json\\r\\n"
_CHUNKED = "POST /v1/chat/completions HTTP/1.1\\r\\n{{head}}{{x}}\\r\\n{{hexlen}}\\r\\n{{body}}"
_TEMPLATES = {"chunked": _CHUNKED + "\\r\\n0\\r\\n\\r\\n"}
_MACROS = {
    "head": _HEAD,
    "body": BODY,
    "canary": CANARY,
    "len": str(len(BODY)),
    "hexlen": f"{len(BODY):x}",
    "HEXLEN": f"{len(BODY):X}",
}
_REPEAT = re.compile(r"\{\{(.*?)\*(\d+)\}\}", re.DOTALL)
_PLAIN_LINE = re.compile(rb"(?<=\r\n)([A-Za-z-]+):( [!-~][ -~]*)(?=\r\n)")


@dataclass(frozen=True, slots=True)
class Case:
    """What is sent, a segment each, and what has to come of it."""

    name: str
    expect: str
    segments: tuple[bytes, ...]
    variant: str = "as written"

    @property
    def bytes(self) -> bytes:
        return b"".join(self.segments)


def cases() -> list[Case]:
    """Every case as written, file after file."""
    return [case for path in sorted(DATA.glob("*.toml")) for case in _file(path)]


def _file(path: Path) -> Iterator[Case]:
    table = tomllib.loads(path.read_text("utf-8"))
    topic = path.stem.partition("_")[2].replace("_", " ")
    for expect in EXPECTATIONS:
        for row in table.get(expect, ()):
            yield Case(f"{topic}: {row['name']}", expect, _segments(row, table))


def _segments(row: dict[str, Any], table: dict[str, Any]) -> tuple[bytes, ...]:
    own = row.get("x", "")
    named = _TEMPLATES.get(row.get("template", ""), table.get("template", "{{x}}"))
    text = row.get("bytes") or named.replace("{{x}}", own)
    macros = _MACROS | {"size": str(len(_bytes(own, _MACROS)))}
    return tuple(_bytes(part, macros) for part in text.split("{{pause}}"))


def _bytes(text: str, macros: dict[str, str]) -> bytes:
    for name, value in macros.items():
        text = text.replace("{{" + name + "}}", value)
    text = _REPEAT.sub(lambda match: match[1] * int(match[2]), text)
    return text.encode("ascii").decode("unicode_escape").encode("latin-1")


def variants(case: Case) -> Iterator[Case]:
    """The same meaning in other bytes, or in other pieces; a seed gives the same ones each time."""
    chance = random.Random(f"{SEED} {case.name}")
    data = case.bytes
    if len(data) <= BYTE_BY_BYTE:
        pieces = tuple(data[i : i + 1] for i in range(len(data)))
        yield replace(case, variant="byte by byte", segments=pieces)
    cuts = sorted(chance.sample(range(1, len(data)), min(3, len(data) - 1)))
    parts = tuple(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))
    yield replace(case, variant=f"cut at {cuts}", segments=parts)
    if len(case.segments) == 1:
        head, end, body = data.partition(b"\r\n\r\n")
        if body:
            apart = (head + end, body)
            yield replace(case, variant="body apart", segments=apart)
        yield from _rewritten(case, head, end + body, chance)


def _rewritten(case: Case, head: bytes, rest: bytes, chance: random.Random) -> Iterator[Case]:
    """Names of headers in another case, more blanks around their values."""

    def case_of(match: re.Match[bytes]) -> bytes:
        name = match[1].swapcase() if chance.random() < 0.7 else match[1].upper()
        return name + b":" + match[2]

    def blanks(match: re.Match[bytes]) -> bytes:
        before, behind = chance.choice((b"", b" ", b"\t", b" \t ")), chance.choice((b"", b" "))
        return match[1] + b":" + before + match[2].strip() + behind

    for variant, change in (("case of names", case_of), ("blanks around values", blanks)):
        changed = _PLAIN_LINE.sub(change, head + b"\r\n")[:-2] if rest else head
        if changed != head:
            yield replace(case, variant=variant, segments=(changed + rest,))
