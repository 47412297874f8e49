"""Follows the KV events of the instances, one task per data-parallel rank.

A rank's batches are numbered from 0. One connection is one process of the engine: as long as it
lasts and no number is missing, the set of published blocks is right. Missed batches are requested
at the engine's replay address, if any. A new connection begins with the last known batch, so that
another process, whose batch of that number differs, is noticed. What cannot be made good empties
the set, and hits are predicted without events until the set is whole again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Set
from contextlib import aclosing, closing
from urllib.parse import urlsplit

from xxhash import xxh3_64_intdigest

from proxy.config.in_force import OptionsInForce
from proxy.core.admission.largest_pays import LargestPays
from proxy.core.kvcache.published import CacheEvent, Cleared, PublishedBlocks, Stored
from proxy.core.types import UNIT_TOKENS
from proxy.fleet.instances import Instances
from proxy.net.kv_events.batches import Batch, BatchError, read
from proxy.net.kv_events.sources import MOST_RANKS, Source, SourcesError, read_sources
from proxy.net.kv_events.zmtp import READ_BYTES, Channel, Message, ZmtpError
from proxy.net.timeouts import Limit
from proxy.net.upstream.client import Upstream
from proxy.protocol.errors import DEFECTS, UpstreamFailure
from proxy.protocol.prompt.facts import unit_hashes, unit_root

LOOK_S = 0.5
"""Interval of comparing the instances with the followed ones."""
ASK_S = 30.0
"""Interval of asking an engine for the address of its events."""
CONNECT_S = 5.0
"""Longest time to connect to an engine's publisher, and to subscribe."""
REPLAY_S = 10.0
"""Longest silence of a replay. A publisher looks for questions ten times a second."""
SILENCE_S = 30.0
"""Time without a batch after which a replay shows whether one was missed."""
PAUSE_S, MOST_PAUSE_S = 0.1, 15.0
"""First and longest pause before the next attempt to connect."""
FRESH_PAUSES = 10
"""Number of first pauses for which an engine's answer holds for all of its ranks."""
SHARE, BURST_S = 0.2, 0.5
"""The part of the processor that one instance's events may take, and how much at once."""
SHORT_S, LONG_COSTS = 0.005, 20
"""A step of decoding that takes longer costs so many times as much: the decoder in C holds the loop
for all of it."""
BLOCK_S, STEP_S, DROP_S = 5e-6, 2e-7, 2e-7
"""Cost of a received block, of one that is walked back, and of one that is dropped."""
MESSAGE_S, MALFORMED_S, OPEN_S = 3e-5, 1e-3, 2e-3
"""Cost of a batch beside its decoding, of one that cannot be read, and of a connection."""
TURN_S = 0.001
"""CPU time that all instances' events may take in one turn of the loop."""
PARTIAL_BYTES = 16 << 20
"""Messages that are not complete have so much memory together."""
MOST_UNKNOWN = 64
"""A batch with more events of unknown types, if these are most of it, ends the connection."""
_END = (1 << 64) - 1
"""The number behind the last batch of a replay: -1 in 64 bits."""
_NUMBER_BYTES = 8
MOST_PORT = 65_535
_TOPIC, _CLAIMS = "KV events", "KV events and answers"
_REFUTED = (
    "its answers report fewer cached tokens than its KV events: hits are predicted without them, "
    "until they agree again"
)
_TOO_MANY = (
    "it has more blocks than there is memory for (--prefix-cache-bytes): hits are predicted "
    "without its KV events"
)
_log = logging.getLogger(__name__)
_LOST = (OSError, RuntimeError, TimeoutError, ZmtpError, UpstreamFailure, SourcesError)


class _Feed:
    """The state of one rank's batches. `last`: number of the last one, -1 before the first.

    `mark`: a digest of that batch. `heard`: the last number on this connection.
    """

    __slots__ = ("blocks", "heard", "last", "mark", "of_instance")

    def __init__(self, blocks: PublishedBlocks, of_instance: _OfInstance) -> None:
        self.blocks, self.of_instance = blocks, of_instance
        self.last: int | None = None
        self.mark = 0
        self.heard = -1

    def wants(self, number: int) -> bool:
        """Whether a batch was not taken in yet."""
        return self.last is None or number > self.last

    def misses(self, number: int) -> bool:
        """Whether there are batches between the last one and this one."""
        return self.last is not None and number > self.last + 1

    def begin(self, first: int | None) -> None:
        """Begin with an empty set at a batch; None: the engine has published nothing yet."""
        self.forget(is_whole=not first)
        self.last = -1 if not first else first - 1

    def lose(self) -> None:
        """Batches are missing for good: what the engine holds is not known any more."""
        self.blocks.lost_gaps += 1
        self.forget(is_whole=False)
        self.last = None

    def forget(self, *, is_whole: bool) -> None:
        """Empty the set. `is_whole`: the engine has no blocks either."""
        self.of_instance.spend(DROP_S * len(self.blocks))
        self.blocks.renew(is_whole=is_whole)


class _Turn:
    """What events have cost in this turn of the loop; it begins anew in the next one.

    Who waits for the next one gets it in the order of coming: one costly instance would else be
    first again and again.
    """

    __slots__ = ("_is_begun", "_line", "_new", "_spent_s")

    def __init__(self) -> None:
        self._spent_s, self._is_begun = 0.0, False
        self._line, self._new = asyncio.Lock(), asyncio.Event()

    def spend(self, cost_s: float) -> None:
        """Note CPU time."""
        self._spent_s += cost_s
        if not self._is_begun:
            self._is_begun = True
            self._new.clear()
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._spent_s, self._is_begun = 0.0, False
        self._new.set()

    @property
    def is_over(self) -> bool:
        """Whether other tasks wait for their turn."""
        return self._spent_s >= TURN_S

    async def next(self) -> None:
        """Wait for a turn that has time left."""
        async with self._line:
            while self.is_over:
                await self._new.wait()


class _OfInstance:
    """State that the ranks of one instance share: their events' address, and their time.

    `ask`: asks the engine for the sources; one question is for all ranks. `decoding`: only one of
    them decodes, or rests, at a time. Whatever is done for the instance is paid for, not only its
    decoding: thousands of small messages cost much that their bytes do not show.
    """

    __slots__ = (
        "_ask",
        "_asked_s",
        "_asking",
        "_at_s",
        "_debt_s",
        "_failed",
        "_now_s",
        "_told",
        "decoding",
        "turn",
    )

    def __init__(
        self,
        ask: Callable[[], Awaitable[dict[int, Source]]],
        now_s: Callable[[], float],
        turn: _Turn,
    ) -> None:
        self._ask, self._now_s, self.turn = ask, now_s, turn
        self._asking, self.decoding = asyncio.Lock(), asyncio.Lock()
        self._asked_s, self._at_s, self._debt_s = -math.inf, 0.0, 0.0
        self._told: Mapping[int, Source] = {}
        self._failed: UpstreamFailure | SourcesError | None = None

    async def sources(self) -> Mapping[int, Source]:
        """The sources by rank; raises what `ask` does."""
        async with self._asking:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._asked_s < FRESH_PAUSES * PAUSE_S:
                if self._failed is not None:
                    raise _again(self._failed)
                return self._told
            self._asked_s, self._failed = now_s, None
            try:
                self._told = await self._ask()
            except (UpstreamFailure, SourcesError) as failure:
                self._failed = _again(failure)
                raise
            return self._told

    def spend(self, cost_s: float) -> None:
        """Note CPU time that was spent for the instance."""
        now_s = self._now_s()
        paid_s = SHARE * (now_s - self._at_s)
        self._debt_s, self._at_s = max(0.0, self._debt_s - paid_s) + cost_s, now_s
        self.turn.spend(cost_s)

    @property
    def has_to_rest(self) -> bool:
        """Whether the instance has taken its share, or other tasks wait for their turn."""
        return self.turn.is_over or self._debt_s > BURST_S

    async def pay(self, cost_s: float) -> None:
        """Note CPU time; after much of it other tasks have their turn, or the instance rests."""
        self.spend(cost_s)
        if self.has_to_rest:
            async with self.decoding:
                await self.rest()

    async def rest(self) -> None:
        """Rest until the share allows for more, one turn of the loop at least; in `decoding`."""
        self.spend(0.0)
        await asyncio.sleep(max(0.0, self._debt_s - BURST_S) / SHARE)
        await self.turn.next()


def _again(failure: UpstreamFailure | SourcesError) -> UpstreamFailure | SourcesError:
    """A copy of the failure without its frames."""
    return failure.again() if isinstance(failure, UpstreamFailure) else SourcesError(str(failure))


class KvEvents:
    """The events of all instances, into the router's `PublishedIndex`."""

    def __init__(self, instances: Instances, options: OptionsInForce) -> None:
        self._instances, self._options = instances, options
        self._published = instances.known.published
        self._clock = instances.clock
        self._turn = _Turn()
        self._partial: LargestPays[Channel] = LargestPays(PARTIAL_BYTES)

    async def run(self) -> None:
        """Follow every instance from its arrival until it leaves, until cancelled."""
        tasks: dict[str, tuple[Upstream, str, asyncio.Task[None]]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                how = self._options.settings.kv_events
                there = {} if how == "off" else dict(self._instances.by_name)
                for name, (upstream, was, task) in list(tasks.items()):
                    if there.get(name) is not upstream or was != how:
                        task.cancel()
                        del tasks[name]
                        self._instances.warn(name, _CLAIMS, None)
                for name in there.keys() - tasks.keys():
                    task = group.create_task(self._follow(there[name]), name=f"kv-events {name}")
                    tasks[name] = there[name], how, task
                for name in tasks:
                    is_believed = self._published.is_believed(name)
                    self._instances.warn(name, _CLAIMS, None if is_believed else _REFUTED)
                await self._sweep()
                await asyncio.sleep(LOOK_S)

    async def _sweep(self) -> None:
        """Free what was lost, in slices."""
        is_left = self._published.sweep()
        while is_left:
            await asyncio.sleep(0)
            is_left = self._published.sweep()

    async def _follow(self, upstream: Upstream) -> None:
        """Follow each rank that the instance has; it may have others after a restart."""
        followed: dict[int, asyncio.Task[None]] = {}
        missed: Set[int] = set()
        fresh_s = pause_s = FRESH_PAUSES * PAUSE_S
        of_instance = _OfInstance(lambda: self._sources(upstream), self._clock.now_s, self._turn)
        async with asyncio.TaskGroup() as group:
            while True:
                found: Set[int] | None = None
                try:
                    found = (await of_instance.sources()).keys()
                except (*_LOST, *DEFECTS) as error:
                    self._warn(upstream, error)
                if found is not None:
                    # One that is not told of twice in a row is none.
                    for rank in missed - found:
                        followed.pop(rank).cancel()
                    missed = followed.keys() - found
                    for rank in sorted(found - followed.keys())[: MOST_RANKS - len(followed)]:
                        follows = self._follow_rank(upstream, rank, of_instance)
                        followed[rank] = group.create_task(follows)
                is_up = self._instances.known.fleet.is_up(upstream.instance.name)
                if is_up and not missed:
                    await asyncio.sleep(ASK_S)
                    pause_s = fresh_s
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, MOST_PAUSE_S)

    async def _sources(self, upstream: Upstream) -> dict[int, Source]:
        """The sources by rank, as the option says or the engine tells.

        Raises SourcesError, and UpstreamFailure where an engine that should tell does not answer.
        """
        instance, at = upstream.instance, self._options.events_at
        address = urlsplit(instance.url)
        host, port = address.hostname or "", address.port or 0
        if at is None:
            body = await upstream.get("/kv_event_sources", self._options.settings.health_timeout)
            return read_sources(body, host)
        try:
            found_host, first, replay = at.of(host, port)
        except ValueError as error:
            raise SourcesError(f"--kv-events: {error}") from error
        ranks = range(min(MOST_RANKS, self._instances.known.gate.ranks(instance.name)))
        if max(first, replay or 0) + len(ranks) > MOST_PORT + 1:
            raise SourcesError(f"--kv-events: {len(ranks)} ranks go beyond port {MOST_PORT}")
        return {
            rank: Source(found_host, first + rank, None if replay is None else replay + rank)
            for rank in ranks
        }

    async def _follow_rank(self, upstream: Upstream, rank: int, of_instance: _OfInstance) -> None:
        """Follow one rank over all its connections, until cancelled."""
        name = upstream.instance.name
        blocks = self._published.open(name, rank)
        feed, pause_s = _Feed(blocks, of_instance), PAUSE_S
        try:
            while True:
                try:
                    source = (await of_instance.sources()).get(rank)
                    if source is None:
                        raise SourcesError("its engine no longer lists KV events")
                    await self._listen(upstream, source, feed)
                except (*_LOST, *DEFECTS) as error:  # nothing of an instance may end all tasks
                    if not isinstance(error, _LOST):
                        _log.exception("instance %s: its KV events cannot be followed", name)
                        feed.lose()
                    blocks.fault = _plain(error)
                    if blocks.is_connected:
                        # What is known holds for the moment that the next attempt takes.
                        blocks.is_connected, pause_s = False, PAUSE_S
                    else:
                        blocks.is_live, pause_s = False, min(2 * pause_s, MOST_PAUSE_S)
                        self._warn(upstream, error)
                await asyncio.sleep(pause_s)
        finally:
            self._published.close(name, rank, blocks)

    def _warn(self, upstream: Upstream, error: BaseException) -> None:
        """Say why an instance's events do not come, if it serves and should have some."""
        name = upstream.instance.name
        told_none = isinstance(error, UpstreamFailure) and not self._published.ranks(name)
        if self._instances.known.fleet.is_up(name) and not told_none:
            text = f"its KV events do not arrive ({_plain(error)}): hits are predicted without them"
            self._instances.warn(name, _TOPIC, text)

    async def _listen(self, upstream: Upstream, source: Source, feed: _Feed) -> None:
        """Follow one connection to its end; raises what ended it."""
        name, blocks = upstream.instance.name, feed.blocks
        opened = await self._open(feed, source.host, source.port, "SUB", "PUB")
        with closing(opened) as channel:
            with Limit(CONNECT_S):
                await channel.send(b"\x01" + source.topic)
            feed.heard = -1
            await self._begin(source, feed)
            blocks.is_connected = blocks.is_live = True
            blocks.fault = None
            self._instances.warn(name, _TOPIC, None)
            while True:
                try:
                    come = await channel.messages(SILENCE_S)
                except TimeoutError:
                    if source.replay_port is not None:
                        await self._catch_up(source, feed)
                    continue
                for message in come:
                    await self._hear(source, feed, message)

    async def _open(self, feed: _Feed, host: str, port: int, kind: str, peer: str) -> Channel:
        """A connection to one of an engine's sockets; what it has and does is counted."""
        name = feed.blocks.name
        await feed.of_instance.pay(OPEN_S)
        channel = await self._connected(host, port, kind, peer)

        def hold(held_bytes: int) -> None:
            if held_bytes <= READ_BYTES:
                self._partial.drop(channel)
            elif (largest := self._partial.hold(channel, name, held_bytes)) is not None:
                largest.close()

        channel.on_held, channel.pay = hold, feed.of_instance.pay
        return channel

    async def _connected(self, host: str, port: int, kind: str, peer: str) -> Channel:
        """A connection to one of an engine's sockets, at its first address that answers."""
        resolver = self._instances.connect_options.resolver
        with Limit(CONNECT_S):
            addresses = await resolver.addresses(host, port)
            for address in addresses[:-1]:
                try:
                    return await Channel.open(address, port, kind, peer)
                except OSError:
                    continue
            return await Channel.open(addresses[-1], port, kind, peer)

    async def _begin(self, source: Source, feed: _Feed) -> None:
        """A new connection: take in what came before it, as far as that can be had."""
        if source.replay_port is not None:
            await self._catch_up(source, feed)
        elif feed.last is not None:
            feed.lose()

    async def _hear(self, source: Source, feed: _Feed, message: Message) -> None:
        """A batch that was published: take it in, unless a replay had it; close a gap before it."""
        number, payload = _batch(message)
        went_back, feed.heard = number <= feed.heard, number
        if went_back:
            # A relay of events stays connected while its engine is replaced.
            feed.blocks.restarts += 1
            feed.begin(number)
        elif feed.last is None:
            feed.begin(number)
        elif feed.misses(number):
            feed.blocks.gaps += 1
            if source.replay_port is not None:
                await self._catch_up(source, feed)
            if feed.misses(number):
                feed.lose()
                feed.begin(number)
        if feed.wants(number):
            await self._take(feed, number, payload)

    async def _catch_up(self, source: Source, feed: _Feed) -> None:
        """Take in by a replay what has been published since the last known batch, or at all."""
        if feed.last is not None and feed.last >= 0 and not await self._goes_on(source, feed):
            feed.blocks.restarts += 1
            feed.last = None
        if feed.last is not None and feed.last >= 0:
            return
        is_first = True
        async with aclosing(self._replay(feed, source, 0)) as batches:
            async for number, payload in batches:
                if is_first:
                    feed.begin(number)
                is_first = False
                await self._take(feed, number, payload)
        if is_first:
            feed.begin(None)

    async def _goes_on(self, source: Source, feed: _Feed) -> bool:
        """Take in what follows the last known batch; False: another process has published it."""
        last, is_same = feed.last, False
        assert last is not None
        async with aclosing(self._replay(feed, source, last)) as batches:
            async for number, payload in batches:
                if number == last:
                    is_same = xxh3_64_intdigest(payload) == feed.mark
                elif not is_same and number > last:
                    # The last known batch is not kept any more: what came between is lost.
                    feed.lose()
                    feed.begin(number)
                    is_same = True
                if not is_same:
                    return False
                if number > last:
                    await self._take(feed, number, payload)
        return is_same

    async def _replay(
        self, feed: _Feed, source: Source, first: int
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """The batches that an engine keeps, from a number on."""
        assert source.replay_port is not None
        with closing(
            await self._open(feed, source.host, source.replay_port, "DEALER", "ROUTER")
        ) as asked:
            with Limit(CONNECT_S):
                await asked.send(b"", first.to_bytes(_NUMBER_BYTES, "big"))
            while True:
                for message in await asked.messages(REPLAY_S):
                    number, payload = _batch(message)
                    if number == _END:
                        return
                    yield number, payload

    async def _take(self, feed: _Feed, number: int, payload: bytes) -> None:
        """Take in one batch, in slices."""
        blocks = feed.blocks
        feed.last, feed.mark = number, xxh3_64_intdigest(payload)
        blocks.batches += 1
        blocks.heard_s = self._clock.now_s()
        try:
            batch = await self._decoded(feed, payload)
        except BatchError as error:
            blocks.malformed += 1
            blocks.fault = str(error)
            feed.forget(is_whole=False)
            return
        blocks.lag_s = self._clock.wall_now() - batch.t
        blocks.skipped_events += batch.other_tier + batch.unknown
        if MOST_UNKNOWN < batch.unknown > len(batch.events) + batch.other_tier:
            # What was known holds no longer, and the next attempts come ever later.
            blocks.is_connected = False
            feed.lose()
            raise ZmtpError("most of its events are of unknown types")
        moves = blocks.chains.moves
        await _apply(feed, batch)
        more_s = BLOCK_S * (blocks.chains.moves - moves)
        more_s += STEP_S * self._published.came(blocks.name)
        # What an event shows only when it is taken in, the next batch waits for.
        feed.of_instance.spend(more_s)
        if (name := self._published.bound()) is not None:
            self._instances.warn(name, _TOPIC, _TOO_MANY)

    async def _decoded(self, feed: _Feed, payload: bytes) -> Batch:
        """A batch, decoded in turns with other tasks; an instance that takes much has to rest.

        Raises BatchError.
        """
        of_instance, batch = feed.of_instance, Batch()
        async with of_instance.decoding:
            try:
                await _fill(batch, payload, of_instance)
            except BatchError:
                of_instance.spend(MALFORMED_S)
                raise
            of_instance.spend(MESSAGE_S + BLOCK_S * sum(map(_blocks, batch.events)))
            if of_instance.has_to_rest:
                await of_instance.rest()
        return batch


async def _fill(batch: Batch, payload: bytes, of_instance: _OfInstance) -> None:
    """Read a payload into a batch, step by step, and note what each takes; in `decoding`."""
    since_s = time.thread_time()
    try:
        for _ in read(payload, batch):
            now_s = time.thread_time()
            of_instance.spend(_price(now_s - since_s))
            since_s = now_s
            if of_instance.has_to_rest:
                await of_instance.rest()
                since_s = time.thread_time()
    finally:
        of_instance.spend(_price(time.thread_time() - since_s))


def _price(step_s: float) -> float:
    """What a step of decoding costs."""
    return step_s * LONG_COSTS if step_s > SHORT_S else step_s


async def _apply(feed: _Feed, batch: Batch) -> None:
    """Take in a batch, in turns with other tasks."""
    blocks, turn = feed.blocks, feed.of_instance.turn
    since_s = time.thread_time()
    for event in batch.events:
        if isinstance(event, Stored):
            blocks.apply(event, _keys(blocks, event))
        else:
            if isinstance(event, Cleared):
                feed.of_instance.spend(DROP_S * len(blocks))
            blocks.apply(event)
        now_s = time.thread_time()
        turn.spend(now_s - since_s)
        since_s = now_s
        if turn.is_over:
            await turn.next()
            since_s = time.thread_time()


def _blocks(event: CacheEvent) -> int:
    """Number of blocks of an event; at least one, since each takes time."""
    return 1 if isinstance(event, Cleared) else max(1, len(event.hashes))


def _keys(blocks: PublishedBlocks, event: Stored) -> list[int]:
    """The keys of as many of an event's leading blocks as have a known one."""
    if event.block_tokens % UNIT_TOKENS or not event.ids:
        return []
    if event.parent is None:
        before = unit_root(event.salt)
    elif (key := blocks.key_of(event.parent)) is not None:
        before = key ^ event.mark
    else:
        return []
    per_block = event.block_tokens // UNIT_TOKENS
    return [
        unit ^ event.mark for unit in unit_hashes(event.ids, before)[per_block - 1 :: per_block]
    ]


def _batch(message: Message) -> tuple[int, bytes]:
    """Number and payload: the last two parts, behind a topic and, of a replay, an empty one."""
    if len(message) < 2 or len(message[-2]) != _NUMBER_BYTES:
        raise ZmtpError("no batch: topic, number and payload are expected")
    return int.from_bytes(message[-2], "big"), message[-1]


def _plain(error: BaseException) -> str:
    """The error in a few words, without addresses."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError):
        return error.strerror or "the connection failed"
    return str(error)
