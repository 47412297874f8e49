"""Others: what the other replicas of this proxy have told, on the owners of what it is about.

Each instance's account and times get the sum over all writers, so a decision costs the same
however many there are. A writer that has been silent for SILENT_S is taken to be gone, and all its
rows go as one. What takes long is done in steps, between which the caller may give others a turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from proxy.core.accounts.lease import Account, Numbers, added, exchanged
from proxy.core.known.fleet_state import FleetState
from proxy.core.kvcache.engine_cache import Use
from proxy.core.kvcache.sessions import Stay
from proxy.core.latency.model import Reserved, Times
from proxy.core.latency.pace import Lately, both_lately
from proxy.core.sharing.batch import MOST_OPEN, NOTHING, Batch, Course, Event, Prompt, Row, Turn
from proxy.core.types import RequestFacts

SILENT_S: Final = 2.5
WRITERS_MAX: Final = 64
"""Replicas that are listened to."""
OPEN_MAX: Final = 1 << 15
"""Uses, and turns, of all writers that are open."""
HASHES_MAX: Final = 1 << 20
"""Hashes of all writers' open uses, 40 MiB."""
Steps = Iterator[None]
"""Work in steps: each is short, and what is between two of them may be anything else."""


class _Heard:
    """The last row of one writer about one instance, and its prefills on the instance's times.

    `keys`: those that are reserved there, by the writer's key. `account`: whose sum its numbers are
    a part of.
    """

    __slots__ = ("account", "keys", "lately", "number", "numbers", "times")

    def __init__(self) -> None:
        self.number = 0
        self.numbers: Numbers = NOTHING
        self.account: Account | None = None
        self.lately: Lately = (0.0, 0.0, 0.0)
        self.times: Times | None = None
        self.keys: dict[tuple[int, int], int] = {}


class _Writer:
    """One of the others: its last batch, when that was heard, its rows by instance, what is open.

    `running`: the turns of sessions.
    """

    __slots__ = ("heard_s", "number", "rows", "running", "uses")

    def __init__(self) -> None:
        self.heard_s = 0.0
        self.number = 0
        self.rows: dict[str, _Heard] = {}
        self.uses: dict[int, tuple[Use, RequestFacts]] = {}
        self.running: dict[int, Stay] = {}


def _finish(steps: Steps) -> None:
    deque(steps, maxlen=0)


def _requests(heard: _Heard) -> int:
    """Requests of a row: in prefill, on their way, in decode."""
    return heard.numbers[1] + heard.numbers[3] + heard.numbers[5]


class Others:
    """What all other replicas have told; `writer`: this one's own name."""

    def __init__(self, known: FleetState, writer: str) -> None:
        self._known, self._own = known, writer
        self._writers: dict[str, _Writer] = {}
        self._uses = self._hashes = self._turns = 0
        """Of all writers: open uses, their hashes, and open turns."""
        self._keys = 0
        """Number of foreign prefills so far: their keys count down, own ones are positive."""

    @property
    def writers(self) -> int:
        """How many others are heard."""
        return len(self._writers)

    def hears(self, writer: str) -> bool:
        """Whether a writer is heard: one of the others, as long as these are not too many."""
        is_new = writer not in self._writers and writer != self._own
        return not is_new or len(self._writers) < WRITERS_MAX

    def apply(self, batch: Batch, now_s: float) -> None:
        """Take in a batch at once; see `steps`."""
        _finish(self.steps(batch, now_s))

    def steps(self, batch: Batch, now_s: float) -> Steps:
        """Take in a batch. Each row counts once, and only where it is newer than the last.

        Events count in their order: those of a batch that is late are not told any more.
        """
        writer = self._writer(batch.writer)
        if writer is None:
            return
        if batch.number > writer.number:
            writer.number, writer.heard_s = batch.number, now_s
            self._known.prefixes.now_s = now_s
            for event in batch.events:
                self._follow(writer, event)
                yield
            for turn in batch.turns:
                self._take_turn(writer, turn, now_s)
                yield
            if batch.is_whole:
                yield from self._end_others(writer, batch.uses, batch.running, now_s)
        yield from self._take_rows(writer, batch, now_s)
        if batch.is_gone:
            yield from self._drop(batch.writer, now_s)

    def _take_rows(self, writer: _Writer, batch: Batch, now_s: float) -> Steps:
        has_changed = False
        for row in batch.rows:
            has_changed |= self._take(writer, row, batch.number, now_s)
            yield
        gone = self._leave_out(writer, batch, now_s) if batch.is_whole else []
        self._sum_up(gone, now_s)
        if has_changed or gone:
            self._known.freed()

    def _writer(self, name: str) -> _Writer | None:
        """Whoever is to be heard under this name: not this replica itself, nor one too many."""
        found = self._writers.get(name)
        if found is None and name != self._own and self.hears(name):
            found = self._writers[name] = _Writer()
        return found

    def _leave_out(self, writer: _Writer, batch: Batch, now_s: float) -> list[str]:
        """Forget the older rows that a whole batch lacks; returns of which instances."""
        named = {row.name for row in batch.rows}
        rows = writer.rows.items()
        gone = [n for n, heard in rows if n not in named and heard.number < batch.number]
        for name in gone:
            self._forget(writer, name, now_s)
        return gone

    def expire(self, now_s: float) -> None:
        """Drop all that writers told who are silent, at once; see `drop_silent`."""
        _finish(self.drop_silent(now_s))

    def drop_silent(self, now_s: float) -> Steps:
        """Drop all that writers told who are silent."""
        for name, writer in list(self._writers.items()):
            if now_s - writer.heard_s > SILENT_S:
                yield from self._drop(name, now_s)

    def drop_all(self, now_s: float) -> Steps:
        """Drop all that anybody has told: this replica has not listened."""
        for name in list(self._writers):
            yield from self._drop(name, now_s)

    def _drop(self, name: str, now_s: float) -> Steps:
        writer = self._writers.pop(name)
        gone = list(writer.rows)
        for instance in gone:
            self._forget(writer, instance, now_s)
            self._sum_up([instance], now_s)
            yield
        if gone:
            self._known.freed()
        yield from self._end_others(writer, (), (), now_s)

    def heard(self, now_s: float) -> list[tuple[str, float, int]]:
        """Each writer, the age of its last batch, and the requests that it has on instances."""
        return [
            (name, now_s - writer.heard_s, sum(_requests(row) for row in writer.rows.values()))
            for name, writer in self._writers.items()
        ]

    def _follow(self, writer: _Writer, event: Event) -> None:
        """Note in the prefix index what has happened to a prompt."""
        reuse, prompt = self._known.reuse, event.prompt
        if prompt is not None:
            self._begin(writer, event.use, prompt, is_there=event.course is Course.RECEIVED)
            return
        found = writer.uses.get(event.use)
        if found is None:
            return
        use, facts = found
        if event.course is Course.COMPUTED:
            reuse.computed(use, facts)
        elif event.course is Course.REPORTED:
            if reuse.reported(use, facts, event.amount):
                self._known.fleet.states.assume_sizes()
        else:
            self._close(writer, event.use)
            if event.course is Course.RELEASED:
                reuse.released(use, facts, int(event.amount))
            reuse.end_use(use)

    def _begin(self, writer: _Writer, number: int, prompt: Prompt, *, is_there: bool) -> None:
        state = self._known.fleet.states.get(prompt.name)
        if state is None or number in writer.uses or not self._has_room(writer, prompt):
            return
        reuse, tenant = self._known.reuse, prompt.tenant
        hashes, tokens = prompt.hashes, prompt.tokens
        facts = RequestFacts("", None, tokens, hashes, prompt.block_tokens, tenant=tenant)
        if is_there:
            self._open(writer, number, reuse.received(state.cache, facts), facts)
            return
        reuse.limit(state.cache, state.kv_tokens, state.assumed_kv_tokens, facts)
        self._open(writer, number, reuse.begin_use(state.cache, facts), facts)

    def _has_room(self, writer: _Writer, prompt: Prompt) -> bool:
        if len(writer.uses) >= MOST_OPEN or self._uses >= OPEN_MAX:
            return False
        return self._hashes + len(prompt.hashes) <= HASHES_MAX

    def _take_turn(self, writer: _Writer, turn: Turn, now_s: float) -> None:
        """Note in the sessions where a turn is placed, where it goes on, or that it is over."""
        sessions, state = self._known.sessions, self._known.fleet.states.get(turn.name)
        if turn.key:
            is_full = len(writer.running) >= MOST_OPEN or self._turns >= OPEN_MAX
            if state is None or is_full or turn.number in writer.running:
                return
            tokens, shared, tenant = turn.tokens or 0, turn.shared_tokens, turn.tenant
            key, cache = turn.key, state.cache
            stay = sessions.assign(key, cache, now_s, tokens, shared, tenant=tenant)
            assert stay is not None
            writer.running[turn.number] = stay
            self._turns += 1
        elif turn.name:
            if state is not None:
                sessions.move(writer.running.get(turn.number), state.cache)
        elif (over := writer.running.pop(turn.number, None)) is not None:
            self._turns -= 1
            sessions.ended(over, turn.tokens, now_s)

    def _end_others(
        self, writer: _Writer, uses: tuple[int, ...], running: tuple[int, ...], now_s: float
    ) -> Steps:
        """End the uses and turns of a writer but those that are still open there."""
        kept, going = set(uses), set(running)
        for number in [number for number in writer.uses if number not in kept]:
            self._known.reuse.end_use(self._close(writer, number)[0])
            yield
        for number in [number for number in writer.running if number not in going]:
            self._turns -= 1
            self._known.sessions.ended(writer.running.pop(number), None, now_s)
            yield

    def _open(self, writer: _Writer, number: int, use: Use, facts: RequestFacts) -> None:
        writer.uses[number] = use, facts
        self._uses += 1
        self._hashes += len(facts.block_hashes)

    def _close(self, writer: _Writer, number: int) -> tuple[Use, RequestFacts]:
        found = writer.uses.pop(number)
        self._uses -= 1
        self._hashes -= len(found[1].block_hashes)
        return found

    def _take(self, writer: _Writer, row: Row, number: int, now_s: float) -> bool:
        heard = writer.rows.get(row.name)
        if heard is None:
            heard = writer.rows[row.name] = _Heard()
        if number <= heard.number:
            return False
        before, heard.number, heard.numbers = heard.numbers, number, row.numbers
        is_as_late = row.recent == heard.lately[0] and row.recent_s == heard.lately[1]
        if not is_as_late:
            heard.lately = row.recent, row.recent_s, now_s - row.recent_age_s
        self._reserve(heard, row, now_s)
        state = self._known.fleet.states.get(row.name)
        account = None if state is None else state.account
        # Rows are frequent, and most change a few numbers of one writer.
        if account is None or account is not heard.account or not is_as_late:
            heard.account = account
            self._sum_up([row.name], now_s)
        elif row.numbers != before and account.foreign is not None:
            account.share(exchanged(account.foreign, before, row.numbers))
        return True

    def _reserve(self, heard: _Heard, row: Row, now_s: float) -> None:
        """Have the instance's times show the prefills of a row, and no others of its writer."""
        if self._known.fleet.states.get(row.name) is None:
            heard.times, heard.keys = None, {}
            return
        times = self._known.latency.of(row.name)
        if times is not heard.times:
            heard.times, heard.keys = times, {}  # another process of the instance
        times.know_turn(now_s - row.turn_age_s)
        present = {prefill.key for prefill in row.prefills}
        for key in [key for key in heard.keys if key not in present]:
            times.end_foreign(heard.keys.pop(key), now_s)
        new: list[Reserved] = []
        for prefill in row.prefills:
            if prefill.key not in heard.keys:
                self._keys -= 1
                heard.keys[prefill.key] = self._keys
                since_s = now_s - prefill.age_s
                new.append((self._keys, prefill.work_s, prefill.share_s, since_s))
        times.reserve_foreign(new)

    def _forget(self, writer: _Writer, name: str, now_s: float) -> None:
        heard = writer.rows.pop(name)
        if heard.times is not None:
            for key in heard.keys.values():
                heard.times.end_foreign(key, now_s)

    def _sum_up(self, names: list[str], now_s: float) -> None:
        """Give each instance's account and times the sum over all writers."""
        for name in names:
            state = self._known.fleet.states.get(name)
            if state is None:
                continue
            numbers, lately = NOTHING, (0.0, 0.0, now_s)
            for writer in self._writers.values():
                if (heard := writer.rows.get(name)) is not None:
                    numbers = added(numbers, heard.numbers)
                    lately = both_lately(lately, heard.lately)
            state.account.share(numbers)
            self._known.latency.of(name).share(lately)
