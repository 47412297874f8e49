"""Ends of text prompts in an engine's chains of blocks.

The proxy has no tokenizer, so it cannot make an engine's blocks of a text. But an answer reports
its prompt's tokens, and the events show the chains that grew meanwhile. The prompt's chain has the
matching length, and the matching session if the engine reports it. A later prompt that begins with
the same messages has the same tokens up to there. So a `Link` is kept under the hash of those
messages (`RequestFacts.ends`), and what is left of its chain is a hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

MOST_TAILS: Final = 256
"""Ends of chains that are remembered until the requests behind them are over."""
MOST_IDS_BYTES: Final = 8192
"""Bytes of token ids kept of the end of a chain, to compare an answer with: 2048 ids."""
ID_BYTES: Final = 4


class Link:
    """The end of a prompt in the chain of blocks of one rank.

    `prompt_tokens`: its length as the engine counted it, 0 if its place in the chain is unknown.
    Then a prompt only passed here, or ended here in an unknown chain (`is_unknown`). `estimate`:
    its length as it was estimated, 0 where it was not. `most`: blocks of prompt and answer, of the
    prompt only where the chain was not found. `tail`: the last of them that is there; `depth`:
    blocks up to there, 0 where none is left. `is_growing`: the answer's last block is still
    awaited. `ids`: the answer's token ids, 4 bytes each, as far as they were published, where
    `wants_ids`. `returned`: how many of them a later prompt begins with behind this one, None while
    that is unknown.
    """

    __slots__ = (
        "depth",
        "estimate",
        "ids",
        "is_growing",
        "most",
        "prompt_tokens",
        "returned",
        "tail",
        "wants_ids",
    )

    def __init__(
        self, tail: int, depth: int, prompt_tokens: int, most: int, estimate: int = 0
    ) -> None:
        self.tail, self.depth = tail, depth
        self.prompt_tokens, self.most, self.estimate = prompt_tokens, most, estimate
        self.is_growing = depth < most
        self.ids = b""
        self.wants_ids = False
        self.returned: int | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether a prompt ended here without a known chain."""
        return self.most > 0 and not self.prompt_tokens

    def lacks(self, block_tokens: int) -> bool:
        """Whether a known prompt has lost some or all of its blocks."""
        return self.depth * block_tokens <= self.prompt_tokens - block_tokens

    def compare(self, ids: bytes) -> None:
        """Note the share of the answer in a text that was tokenised to these ids."""
        most = min(len(ids), len(self.ids)) // ID_BYTES
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if ids[: middle * ID_BYTES] == self.ids[: middle * ID_BYTES]:
                low = middle
            else:
                high = middle - 1
        self.returned = low


class Tail:
    """The end of a chain, its session if the engine reports it, and its time.

    `ids`: the last token ids up to there.
    """

    __slots__ = ("ids", "name", "session", "t_s")

    def __init__(self, name: int, session: str, t_s: float, ids: bytes) -> None:
        self.name, self.session, self.t_s, self.ids = name, session, t_s, ids


class Chains:
    """The links of one rank, in step with its blocks, and the chains that grew lately."""

    __slots__ = ("_links", "_tails")

    def __init__(self) -> None:
        self._links: dict[int, dict[Link, None]] = {}
        self._tails: OrderedDict[int, Tail] = OrderedDict()

    def grew(
        self, parent: int | None, names: Sequence[int], session: str, t_s: float, ids: bytes
    ) -> None:
        """Note blocks stored after `parent` at `t_s`; `ids`: their token ids."""
        tails = self._tails
        if parent is not None:
            if (links := self._links.get(parent)) is not None:
                self._follow(links, names, ids)
            old = tails.pop(parent, None)
            ids = old.ids + ids if old is not None and ids else ids
        last = names[-1]
        tails.pop(last, None)
        tails[last] = Tail(last, session, t_s, ids[-MOST_IDS_BYTES:])
        if len(tails) > MOST_TAILS:
            tails.popitem(last=False)

    def _follow(self, links: dict[Link, None], names: Sequence[int], ids: bytes) -> None:
        """Extend links that lack their answer's end along these blocks."""
        for link in [link for link in links if link.is_growing]:
            steps = min(len(names), link.most - link.depth)
            self.drop(link)
            if link.wants_ids:
                size = len(ids) // len(names)
                behind = max(0, link.prompt_tokens * ID_BYTES - link.depth * size)
                end = steps * size
                # A slice of bytes that begins after its end is an error where this is compiled.
                link.ids += ids[min(behind, end) : end]
            link.depth += steps
            link.is_growing = link.depth < link.most
            self.keep(link, names[steps - 1])

    def keep(self, link: Link, tail: int) -> None:
        """Keep a link at this block."""
        link.tail = tail
        self._links.setdefault(tail, {})[link] = None

    def drop(self, link: Link) -> None:
        """Drop a link."""
        links = self._links.get(link.tail)
        if links is not None:
            links.pop(link, None)
            if not links:
                del self._links[link.tail]

    def evicted(self, name: int, before: int | None, depth: int) -> None:
        """Remove a block; the block `before` it, None if gone too, is `depth` deep."""
        self._tails.pop(name, None)
        links = self._links.pop(name, None)
        if links is None:
            return
        for link in links:
            link.is_growing, link.depth = False, 0
            if before is not None:
                link.depth = depth
                self.keep(link, before)

    def clear(self) -> None:
        """Remove all blocks."""
        for links in self._links.values():
            for link in links:
                link.is_growing, link.depth = False, 0
        self._links = {}
        self._tails.clear()

    def ids_before(self, name: int, count: int) -> bytes:
        """The last `count` token ids of a chain; empty if unknown."""
        tail = self._tails.get(name)
        size = count * ID_BYTES
        return tail.ids[-size:] if tail is not None and 0 < size <= len(tail.ids) else b""

    def tails(self, since_s: float, session: str) -> list[int]:
        """Ends of chains that grew since a moment, latest first.

        Of this session where there are any; never of another one.
        """
        found: list[Tail] = []
        for tail in reversed(self._tails.values()):
            if tail.t_s < since_s:
                break
            found.append(tail)
        own = [tail.name for tail in found if session and tail.session == session]
        return own or [tail.name for tail in found if not (session and tail.session)]
