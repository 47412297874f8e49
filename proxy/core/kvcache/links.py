"""Ends of text prompts in an engine's chains of blocks.

The proxy has no tokenizer, so it cannot make an engine's blocks of a text. But an answer reports
its prompt's tokens, and the events show the chains that grew meanwhile. The prompt's chain has the
matching length, and the matching session if the engine reports it. A later prompt that begins with
the same messages has the same tokens up to there. So a `Link` is kept under the hash of those
messages (`RequestFacts.ends`), and what is left of its chain is a hit.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Final

MOST_TAILS: Final = 256
"""Ends of chains that are remembered until the requests behind them are over."""
MOST_IDS_BYTES: Final = 8192
"""Bytes of token ids kept of the end of a chain, to compare an answer with: 2048 ids. Of a
longer answer none are kept."""
MOST_SAID_BYTES: Final = 32 << 20
"""Bytes of the token ids that all links have together."""
SAID_BYTES: Final = 400
"""What a link's ids take beside their own bytes."""
ROOM_BYTES: Final = MOST_SAID_BYTES >> 7
"""What is freed beyond the bound, so that not every new link has to look for the oldest."""
MOST_GROWING: Final = 8
"""Links at one block that wait for an answer's last block: each moves with the next block. Of more,
the oldest stays where it is."""
ID_BYTES: Final = 4
SWEPT: Final = 1024
"""Entries of lost tables that are freed at once: a ms, as each lies somewhere else in memory."""


class Lost:
    """Tables of sets that were given up, which are freed piece by piece.

    A large one takes many ms to free, and nobody should wait for it.
    """

    __slots__ = ("_tables",)

    def __init__(self) -> None:
        self._tables: deque[dict[int, Any]] = deque()

    def __len__(self) -> int:
        """Entries that are still there."""
        return sum([len(table) for table in self._tables])

    def take(self, table: dict[int, Any]) -> None:
        """Free a table that nobody uses any more, some of it later."""
        if table:
            self._tables.append(table)

    def sweep(self, count: int = SWEPT) -> bool:
        """Free up to so many entries; whether some are left."""
        while self._tables and count > 0:
            table = self._tables[0]
            some = min(count, len(table))
            for _ in range(some):
                table.popitem()
            count -= some
            if not table:
                self._tables.popleft()
        return bool(self._tables)


class Time:
    """The time from one moment at which a rank had no blocks to the next one."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class Spot:
    """Where links stand in a rank's chains: at one block, as many as share it.

    `tail`: the block's name; `depth`: blocks up to there, 0 where none is left. All are gone when
    its `time` is over. `links`: how many stand there. `growing`: those of them that wait for an
    answer's last block, the newest last. `into`: the spot that has taken this one in, as its block
    was evicted.
    """

    __slots__ = ("depth", "growing", "into", "links", "tail", "time")

    def __init__(self, tail: int, depth: int, time: Time) -> None:
        self.tail, self.depth, self.time = tail, depth, time
        self.links = 0
        self.growing: dict[Link, None] | None = None
        self.into: Spot | None = None


NOWHERE: Final = Spot(0, 0, Time())


class Link:
    """The end of a prompt in the chain of blocks of one rank.

    `prompt_tokens`: its length as the engine counted it, 0 if its place in the chain is unknown.
    Then a prompt only passed here, or ended here in an unknown chain (`is_unknown`). `estimate`:
    its length as it was estimated, 0 where it was not. `most`: blocks of prompt and answer, of the
    prompt only where the chain was not found. `spot`: the last of them that is there. `ids`: the
    answer's token ids, 4 bytes each, as far as they were published, where `wants_ids`. `returned`:
    how many of them a later prompt begins with behind this one, None while that is unknown.
    """

    __slots__ = (
        "_spot",
        "estimate",
        "ids",
        "most",
        "prompt_tokens",
        "returned",
        "wants_ids",
    )

    def __init__(
        self, tail: int, depth: int, prompt_tokens: int, most: int, estimate: int = 0
    ) -> None:
        self._spot = Spot(tail, depth, Time()) if tail or depth else NOWHERE
        self.prompt_tokens, self.most, self.estimate = prompt_tokens, most, estimate
        self.ids = b""
        self.wants_ids = False
        self.returned: int | None = None

    @property
    def spot(self) -> Spot:
        """Where it stands now."""
        spot = self._spot
        while (into := spot.into) is not None:
            if into.into is not None:
                spot.into = into.into  # the next look has half of the way
            spot = into
        self._spot = spot
        return spot

    def stand(self, spot: Spot) -> None:
        """Stand there from now on."""
        self._spot = spot

    @property
    def tail(self) -> int:
        """The last of its blocks that is there."""
        return self.spot.tail

    @property
    def depth(self) -> int:
        """Blocks up to there, 0 where none is left."""
        spot = self.spot
        return 0 if spot.time.is_over else spot.depth

    @property
    def is_unknown(self) -> bool:
        """Whether a prompt ended here without a known chain."""
        return self.most > 0 and not self.prompt_tokens

    def lacks(self, block_tokens: int) -> bool:
        """Whether a known prompt has lost some or all of its blocks."""
        return self.depth * block_tokens <= self.prompt_tokens - block_tokens

    def compare(self, ids: bytes) -> None:
        """Note the share of the answer in a text that was tokenised to these ids."""
        if not self.ids:
            return  # others' took their room meanwhile
        most = min(len(ids), len(self.ids)) // ID_BYTES
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if ids[: middle * ID_BYTES] == self.ids[: middle * ID_BYTES]:
                low = middle
            else:
                high = middle - 1
        self.returned = low


class Own:
    """The links of one instance that have ids, the oldest first, and the bytes of these."""

    __slots__ = ("bytes", "links")

    def __init__(self) -> None:
        self.bytes = 0
        self.links: OrderedDict[Link, None] = OrderedDict()


class Said:
    """The token ids of all links' answers; the oldest of the instance that has most go first.

    An answer's length is what its engine says, so the number of links bounds no memory.
    """

    __slots__ = ("_by_name", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self._by_name: dict[str, Own] = {}

    def keep(self, link: Link, name: str, ids: bytes) -> None:
        """Let a link of this instance have these ids, or none."""
        self.forget(link, name)
        if not ids:
            return
        own = self._by_name.get(name)
        if own is None:
            own = self._by_name[name] = Own()
        link.ids = ids
        own.links[link] = None
        own.bytes += len(ids) + SAID_BYTES
        self.bytes += len(ids) + SAID_BYTES
        if self.bytes > MOST_SAID_BYTES:
            self._make_room()

    def _make_room(self) -> None:
        """Let the oldest links have no ids, and some more: it looks at each instance for it."""
        enough = MOST_SAID_BYTES - ROOM_BYTES
        while self.bytes > enough:
            name = max(self._by_name, key=self._bytes_of)
            own = self._by_name[name]
            while own.links and self.bytes > enough:
                oldest = next(iter(own.links))
                oldest.wants_ids = False
                self.forget(oldest, name)

    def _bytes_of(self, name: str) -> int:
        return self._by_name[name].bytes

    def forget(self, link: Link, name: str) -> None:
        """Let a link of this instance have no ids."""
        own = self._by_name.get(name)
        if own is not None and link in own.links:
            del own.links[link]
            size = len(link.ids) + SAID_BYTES
            own.bytes -= size
            self.bytes -= size
            if not own.links:
                del self._by_name[name]
        link.ids = b""


class Tail:
    """The end of a chain, its session if the engine reports it, and its time.

    `ids`: the last token ids up to there.
    """

    __slots__ = ("ids", "name", "session", "t_s")

    def __init__(self, name: int, session: str, t_s: float, ids: bytes) -> None:
        self.name, self.session, self.t_s, self.ids = name, session, t_s, ids


class Chains:
    """The links of a rank of the instance `name`, in step with its blocks, and what grew lately.

    `moves`: how often a link has moved to a later block. `said`, `lost`: shared with other ranks.
    """

    __slots__ = ("_spots", "_tails", "_time", "lost", "moves", "name", "said")

    def __init__(self, name: str = "", said: Said | None = None, lost: Lost | None = None) -> None:
        self.name = name
        self.said = Said() if said is None else said
        self.lost = Lost() if lost is None else lost
        self.moves = 0
        self._time = Time()
        self._spots: dict[int, Spot] = {}
        self._tails: OrderedDict[int, Tail] = OrderedDict()

    def grew(
        self, parent: int | None, names: Sequence[int], session: str, t_s: float, ids: bytes
    ) -> None:
        """Note blocks stored after `parent` at `t_s`; `ids`: their token ids."""
        tails = self._tails
        if parent is not None:
            if (spot := self._spots.get(parent)) is not None and spot.growing:
                self._follow(spot.growing, names, ids)
            old = tails.pop(parent, None)
            ids = old.ids + ids if old is not None and ids else ids
        last = names[-1]
        tails.pop(last, None)
        tails[last] = Tail(last, session, t_s, ids[-MOST_IDS_BYTES:])
        if len(tails) > MOST_TAILS:
            tails.popitem(last=False)

    def _follow(self, growing: dict[Link, None], names: Sequence[int], ids: bytes) -> None:
        """Extend links that lack their answer's end along these blocks."""
        for link in list(growing):
            depth = link.depth
            steps = min(len(names), link.most - depth)
            if steps <= 0:
                growing.pop(link, None)  # the publisher contradicts itself
                continue
            self.moves += 1
            if link.wants_ids:
                size = len(ids) // len(names)
                behind = max(0, link.prompt_tokens * ID_BYTES - depth * size)
                end = steps * size
                self._hear(link, ids, min(behind, end), end)
            self.drop(link)
            self.keep(link, names[steps - 1], depth + steps)

    def _hear(self, link: Link, ids: bytes, begin: int, end: int) -> None:
        """Add a part of these ids to what is known of an answer, unless it is too long."""
        if len(link.ids) + end - begin > MOST_IDS_BYTES:
            link.wants_ids = False
            self.said.forget(link, self.name)
        elif begin < end:
            self.said.keep(link, self.name, link.ids + ids[begin:end])

    def keep(self, link: Link, tail: int, depth: int) -> None:
        """Let a link stand at this block, so deep; it stands nowhere else."""
        spot = self._spots.get(tail)
        if spot is None:
            spot = self._spots[tail] = Spot(tail, depth, self._time)
        spot.links += 1
        link.stand(spot)
        if depth < link.most:
            if spot.growing is None:
                spot.growing = {}
            spot.growing[link] = None
            if len(spot.growing) > MOST_GROWING:
                del spot.growing[next(iter(spot.growing))]

    def forget(self, link: Link) -> None:
        """Let a link that nobody asks for any more stand nowhere, without ids."""
        self.drop(link)
        self.said.forget(link, self.name)

    def drop(self, link: Link) -> None:
        """Let a link stand nowhere."""
        spot = link.spot
        if spot.growing is not None:
            spot.growing.pop(link, None)
        if self._spots.get(spot.tail) is not spot:
            return
        spot.links -= 1
        if not spot.links:
            del self._spots[spot.tail]

    def evicted(self, name: int, before: int | None, depth: int) -> None:
        """Remove a block; the block `before` it, None if gone too, is `depth` deep.

        The links there move at once, however many they are.
        """
        self._tails.pop(name, None)
        spot = self._spots.pop(name, None)
        if spot is None:
            return
        spot.growing = None
        if before is None:
            spot.depth = 0
            return
        other = self._spots.get(before)
        if other is not None and other.links > spot.links:
            spot.into = other
            other.links += spot.links
            return
        # The smaller one goes into the larger one, so no link is ever far from its spot.
        if other is not None:
            other.into, spot.growing = spot, other.growing
            spot.links += other.links
            other.growing = None
        spot.tail, spot.depth = before, depth
        self._spots[before] = spot

    def clear(self) -> None:
        """Remove all blocks, in a moment, however many there are."""
        self._time.is_over = True
        self._time = Time()
        self.lost.take(self._spots)
        self._spots = {}
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
