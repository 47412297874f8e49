"""Room for bodies before admission: bytes kept, bodies that wait, and bodies to end.

A body takes what has come of it at once, and asks for room for the rest before that is read. While
there is none it waits, and so does its client. An owner is a tenant, or a client's address. Of
those that wait the one goes first whose owner has and wants least, and of that owner's the smallest
and youngest. While others wait, a body that stalls for PATIENCE_S or is slower than LEAST_RATE is
ended. The owner with most bytes pays first, with its largest and oldest body. One that is whole
ends only for another owner's, where its own has half of all.
"""

from __future__ import annotations

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


class UploadRoom:
    """The bodies that are not admitted yet. A single one has room, whatever its length."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = self._unasked = 0
        self._owned: dict[str, int] = {}
        """Bytes that each owner's bodies have or wait for."""
        self._uploads: dict[Upload, None] = {}
        self._waiting: dict[Upload, None] = {}

    def __len__(self) -> int:
        return len(self._uploads)

    @property
    def is_over(self) -> bool:
        """Whether the bytes exceed the hard limit: those sent with a head come unasked."""
        more = self.max_bytes * (OVER - 1)
        return self._unasked > more and self.held_bytes > self.max_bytes + more

    def enter(self, owner: str, held: int, now_s: float) -> Upload:
        """Add a body with the bytes received so far."""
        upload = Upload(owner, held, now_s)
        self._uploads[upload] = None
        self.held_bytes += held
        self._unasked += held
        self._owned[owner] = self._owned.get(owner, 0) + held
        return upload

    def leave(self, upload: Upload) -> None:
        """Remove a body that is admitted, refused or gone; once for each."""
        if upload not in self._uploads:
            return
        del self._uploads[upload]
        self._waiting.pop(upload, None)
        self.held_bytes -= upload.held
        self._unasked -= upload.unasked
        left = self._owned[upload.owner] - upload.held - upload.wanted
        if left:
            self._owned[upload.owner] = left
        else:
            del self._owned[upload.owner]

    def resize(self, upload: Upload, held: int) -> None:
        """Correct the length of a body that is complete."""
        if upload not in self._uploads:
            return
        more = held - upload.held
        self._owned[upload.owner] += more
        self.held_bytes += more
        self._unasked += max(0, more)
        upload.unasked += max(0, more)
        upload.held = held

    def ask(self, upload: Upload, more: int) -> None:
        """Let a body wait for room for more bytes; `granted` says when it has it."""
        upload.wanted = more
        self._owned[upload.owner] += more
        self._waiting[upload] = None

    def granted(self, now_s: float) -> list[Upload]:
        """The waiting bodies that have room from now on."""
        found: list[Upload] = []
        while (upload := self._next(now_s)) is not None and self._fits(upload):
            del self._waiting[upload]
            upload.held += upload.wanted
            self.held_bytes += upload.wanted
            self._unasked -= upload.unasked
            upload.wanted, upload.unasked = 0, 0
            upload.since_s = upload.moved_s = now_s
            found.append(upload)
        return found

    def _next(self, now_s: float) -> Upload | None:
        best: Upload | None = None
        least = (0, 0.0)
        for upload in self._waiting:
            # What an owner's other waiting bodies want counts too: many small ones are one large.
            size, age_s = upload.held + upload.wanted, now_s - upload.since_s
            key = self._owned[upload.owner], size * (age_s + _SOON_S)
            if best is None or key < least:
                best, least = upload, key
        return best

    def _fits(self, upload: Upload) -> bool:
        is_alone = self.held_bytes == upload.held
        return is_alone or self.held_bytes + upload.wanted <= self.max_bytes

    def overdue(self, now_s: float) -> Upload | None:
        """The body to end because others wait, if one has had its time.

        Those that wait hold up others by what came of them before only, if that is half of all.
        """
        waiter = self._next(now_s)
        if waiter is None:
            return None
        due = [u for u in self._uploads if self._is_due(u, waiter, now_s)]
        if not due:
            are_all = len(self._waiting) == len(self._uploads)
            if are_all or 2 * sum([u.held for u in self._waiting]) > self.max_bytes:
                due = [u for u in self._waiting if now_s - u.since_s > LONG_WAIT_S]
        return self._worst(due, now_s)

    def moved(self, upload: Upload, come: int, now_s: float) -> None:
        """Set the bytes of a body received so far."""
        if come - upload.come >= STEP_BYTES:
            upload.come, upload.moved_s = come, now_s

    def _is_due(self, upload: Upload, waiter: Upload, now_s: float) -> bool:
        age_s = now_s - upload.since_s
        if upload.wanted or age_s <= PATIENCE_S:
            return False
        if upload.is_whole:
            is_others = upload.owner != waiter.owner
            return is_others and 2 * self._owned[upload.owner] > self.max_bytes
        is_still = now_s - upload.moved_s > PATIENCE_S
        return is_still or age_s > PATIENCE_S + upload.come / LEAST_RATE

    def worst(self, now_s: float) -> Upload | None:
        """The body to end because the hard limit is exceeded."""
        return self._worst(list(self._uploads), now_s)

    def _worst(self, uploads: list[Upload], now_s: float) -> Upload | None:
        found: Upload | None = None
        most = (0, 0.0)
        for upload in uploads:
            key = self._owned[upload.owner], upload.held * (now_s - upload.since_s)
            if found is None or key > most:
                found, most = upload, key
        return found
