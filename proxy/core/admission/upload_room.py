"""Room for bodies before admission: bytes kept, bodies that wait, and bodies to end.

A body takes what has come of it at once, and asks for room for the rest before that is read. While
there is none it waits, and so does its client. An owner is a tenant, or a client's address. Of
those that wait the one goes first whose owner has and wants least, and of that owner's the smallest
and youngest. While others wait, a body that stalls for PATIENCE_S or is slower than LEAST_RATE is
ended. The owner with most bytes pays first, with its largest and oldest body. One that is whole
ends only for another owner's, where its own has half of all.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from proxy.core.admission.order import Order

PATIENCE_S, STEP_BYTES = 0.5, 1 << 16
"""A body with fewer bytes than the second in the time of the first stalls."""
LEAST_RATE = 1 << 20
"""Bytes per second, behind PATIENCE_S."""
LONG_WAIT_S = 2.0
_SOON_S = 0.1


OVER = 1.625
"""Factor by which unasked bytes of bodies may exceed the limit. With 32 MiB there is room for the
first reads of 200 long bodies at once."""


class Upload:
    """One body. `held`: bytes that it may take; `wanted`: further ones that it waits for.

    `unasked`: of those held, what came before there was room for it; `since_s`: when it came, or
    had room for more of it. `come`: bytes that were there at `moved_s`. `is_whole`: nothing more
    comes.
    """

    __slots__ = ("come", "held", "is_whole", "moved_s", "owner", "since_s", "unasked", "wanted")

    def __init__(self, owner: str, held: int, since_s: float) -> None:
        self.owner, self.held, self.since_s = owner, held, since_s
        self.unasked, self.wanted = held, 0
        self.come, self.moved_s, self.is_whole = held, since_s, False


class _Due:
    """Bodies that may have to go, the worst of the owner with most bytes first.

    Found at one moment, at which nothing is added: what an owner has only becomes less.
    """

    def __init__(self, uploads: list[Upload], owned: dict[str, int], now_s: float) -> None:
        self._owned = owned
        by_owner: dict[str, list[tuple[float, int, Upload]]] = {}
        for number, upload in enumerate(uploads):
            weight = upload.held * (now_s - upload.since_s)
            by_owner.setdefault(upload.owner, []).append((weight, -number, upload))
        self._by_owner = by_owner
        for items in by_owner.values():
            items.sort()
        self._heap = [self._key(owner) for owner in by_owner]
        heapify(self._heap)

    def _key(self, owner: str) -> tuple[int, float, int, str]:
        weight, number, _ = self._by_owner[owner][-1]
        return -self._owned.get(owner, 0), -weight, -number, owner

    def first(self, still: dict[Upload, None], but: str | None = None) -> Upload | None:
        """The worst of those that are there `still`; not of the owner `but`."""
        heap, kept = self._heap, None
        found: Upload | None = None
        while heap and found is None:
            owner = heap[0][3]
            items = self._by_owner[owner]
            while items and items[-1][2] not in still:
                items.pop()
            if not items:
                heappop(heap)
            elif (key := self._key(owner)) != heap[0]:
                heapreplace(heap, key)
            elif owner == but:
                kept = heappop(heap)
            else:
                found = items[-1][2]
        if kept is not None:
            heappush(heap, kept)
        return found


class Round:
    """One look at the bodies that have had their time, however many of them have to go."""

    def __init__(self, room: UploadRoom, now_s: float) -> None:
        self._room, self._now_s = room, now_s
        self._moving: _Due | None = None
        self._whole: _Due | None = None
        self._long: _Due | None = None

    def overdue(self) -> Upload | None:
        """The body to end because others wait, if one has had its time.

        Those that wait hold up others by what came of them before only, if that is half of all.
        """
        room = self._room
        waiter = room.next(self._now_s)
        if waiter is None:
            return None
        found = self._with_room(waiter)
        if found is None and room.are_waiting_much:
            if self._long is None:
                self._long = room.long_waiting(self._now_s)
            found = self._long.first(room.waiting)
        return found

    def _with_room(self, waiter: Upload) -> Upload | None:
        """The worst of those that have room and had their time."""
        room, now_s = self._room, self._now_s
        moving, whole = self._moving, self._whole
        if moving is None or whole is None:
            moving, whole = self._moving, self._whole = room.due(now_s)
        one = moving.first(room.uploads)
        other = whole.first(room.uploads, but=waiter.owner)
        # The first is of the owner that has most: no other one has half where it has not.
        if other is None or not room.has_half(other.owner):
            return one
        return other if one is None else room.worse(one, other, now_s)


class UploadRoom:
    """The bodies that are not admitted yet. A single one has room, whatever its length.

    No step looks at all of them, but the first of a `Round` and the first `worst`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = self._unasked = self._waiting_held = 0
        self._owned: dict[str, int] = {}
        """See `owned`; an owner of nothing is not here."""
        self.uploads: dict[Upload, None] = {}
        self.waiting: dict[Upload, None] = {}
        self._turns: Order[Upload] = Order()
        """Those that wait: least and youngest first."""
        self._heavy: Order[Upload] | None = None
        """All: most and oldest first. Kept from the first time that it is asked for, while there
        are any."""

    def __len__(self) -> int:
        return len(self.uploads)

    @property
    def is_over(self) -> bool:
        """Whether the bytes exceed the hard limit: those sent with a head come unasked."""
        more = self.max_bytes * (OVER - 1)
        return self._unasked > more and self.held_bytes > self.max_bytes + more

    def enter(self, owner: str, held: int, now_s: float) -> Upload:
        """Add a body with the bytes received so far."""
        upload = Upload(owner, held, now_s)
        self.uploads[upload] = None
        self.held_bytes += held
        self._unasked += held
        self._own(owner, held)
        if self._heavy is not None:
            self._heavy.add(upload, owner, -self.owned(owner), -held, now_s)
        return upload

    def leave(self, upload: Upload) -> None:
        """Remove a body that is admitted, refused or gone; once for each."""
        if upload not in self.uploads:
            return
        del self.uploads[upload]
        self._wait_no_longer(upload)
        self.held_bytes -= upload.held
        self._unasked -= upload.unasked
        if self._heavy is not None:
            self._heavy.remove(upload, upload.owner)
            if not self.uploads:
                self._heavy = None
        self._own(upload.owner, -upload.held - upload.wanted)

    def resize(self, upload: Upload, held: int) -> None:
        """Correct the length of a body that is complete."""
        if upload not in self.uploads:
            return
        more = held - upload.held
        self.held_bytes += more
        self._unasked += max(0, more)
        upload.unasked += max(0, more)
        upload.held = held
        self._own(upload.owner, more)
        if upload in self.waiting:
            self._waiting_held += more
            size, since_s = held + upload.wanted, upload.since_s - _SOON_S
            self._turns.reweigh(upload, upload.owner, size, since_s)
        self._reweigh(upload)

    def ask(self, upload: Upload, more: int) -> None:
        """Let a body wait for room for more bytes; `granted` says when it has it."""
        self._wait_no_longer(upload)
        self._own(upload.owner, more - upload.wanted)
        upload.wanted = more
        self.waiting[upload] = None
        self._waiting_held += upload.held
        size, since_s = upload.held + more, upload.since_s - _SOON_S
        self._turns.add(upload, upload.owner, self.owned(upload.owner), size, since_s)

    def granted(self, now_s: float) -> list[Upload]:
        """The waiting bodies that have room from now on."""
        found: list[Upload] = []
        while (upload := self.next(now_s)) is not None and self._fits(upload):
            self._wait_no_longer(upload)
            upload.held += upload.wanted
            self.held_bytes += upload.wanted
            self._unasked -= upload.unasked
            upload.wanted, upload.unasked = 0, 0
            upload.since_s = upload.moved_s = now_s
            self._reweigh(upload)
            found.append(upload)
        return found

    def next(self, now_s: float) -> Upload | None:
        """The body whose turn it is.

        What an owner's other waiting bodies want counts too: many small ones are one large.
        """
        return self._turns.first(now_s)

    def _fits(self, upload: Upload) -> bool:
        is_alone = self.held_bytes == upload.held
        return is_alone or self.held_bytes + upload.wanted <= self.max_bytes

    def _own(self, owner: str, more: int) -> None:
        """An owner's bodies have or want so much more."""
        owned = self.owned(owner) + more
        if owned:
            self._owned[owner] = owned
        else:
            self._owned.pop(owner, None)
        self._turns.rank(owner, owned)
        if self._heavy is not None:
            self._heavy.rank(owner, -owned)

    def _wait_no_longer(self, upload: Upload) -> None:
        if upload in self.waiting:
            del self.waiting[upload]
            self._waiting_held -= upload.held
            self._turns.remove(upload, upload.owner)

    def _reweigh(self, upload: Upload) -> None:
        if self._heavy is not None:
            self._heavy.reweigh(upload, upload.owner, -upload.held, upload.since_s)

    def overdue(self, now_s: float) -> Upload | None:
        """The first body of a `Round`."""
        return Round(self, now_s).overdue()

    @property
    def are_waiting_much(self) -> bool:
        """Whether those that wait are all, or have more than half of all bytes."""
        are_all = len(self.waiting) == len(self.uploads)
        return are_all or 2 * self._waiting_held > self.max_bytes

    def moved(self, upload: Upload, come: int, now_s: float) -> None:
        """Set the bytes of a body received so far."""
        if come - upload.come >= STEP_BYTES:
            upload.come, upload.moved_s = come, now_s

    def due(self, now_s: float) -> tuple[_Due, _Due]:
        """Of those that have room: who stalls or is slow, and who is whole for a while."""
        old = [u for u in self.uploads if not u.wanted and now_s - u.since_s > PATIENCE_S]
        slow = [u for u in old if not u.is_whole and _is_slow(u, now_s)]
        whole = [u for u in old if u.is_whole and self.has_half(u.owner)]
        return _Due(slow, self._owned, now_s), _Due(whole, self._owned, now_s)

    def long_waiting(self, now_s: float) -> _Due:
        """Those that wait for long."""
        long = [u for u in self.waiting if now_s - u.since_s > LONG_WAIT_S]
        return _Due(long, self._owned, now_s)

    def owned(self, owner: str) -> int:
        """Bytes that an owner's bodies have or wait for."""
        return self._owned.get(owner, 0)

    def has_half(self, owner: str) -> bool:
        """Whether an owner has or wants more than half of all."""
        return 2 * self.owned(owner) > self.max_bytes

    def worst(self, now_s: float) -> Upload | None:
        """The body to end because the hard limit is exceeded."""
        if self._heavy is None:
            heavy: Order[Upload] = Order()
            for u in self.uploads:
                heavy.add(u, u.owner, -self.owned(u.owner), -u.held, u.since_s)
            self._heavy = heavy if self.uploads else None
            return heavy.first(now_s)
        return self._heavy.first(now_s)

    def worse(self, one: Upload, other: Upload, now_s: float) -> Upload:
        """Of two bodies the one that has to go first."""
        mine = self.owned(one.owner), one.held * (now_s - one.since_s)
        its = self.owned(other.owner), other.held * (now_s - other.since_s)
        return other if its > mine else one


def _is_slow(upload: Upload, now_s: float) -> bool:
    age_s = now_s - upload.since_s
    is_still = now_s - upload.moved_s > PATIENCE_S
    return is_still or age_s > PATIENCE_S + upload.come / LEAST_RATE
