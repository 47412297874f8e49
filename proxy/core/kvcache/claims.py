"""Claims of an engine's KV events, compared with the cached tokens of its answers.

Events tell of an engine's cache without proof. A wrong port, a relay of another engine's events, or
a lie would draw all requests to an instance that has nothing of them. So what the events said of a
prompt when it was placed (`Claim`) is compared with the cached tokens of its answer. That an engine
has removed the blocks meanwhile may happen to any; but not with all claims for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

SLACK_BLOCKS: Final = 2
SLACK_RATIO: Final = 0.1
"""A claim too large by so many of the engine's blocks, or this part, is right. Some engines compute
the last blocks again, or find only prefixes of certain lengths."""
BELIEVED_WRONG: Final = 3
BELIEVED_RIGHT: Final = 3
"""Wrong claims until an engine's events are no longer trusted, and right claims in a row until they
are again."""
BELIEVED_GONE: Final = 32
"""Claims without a right one between them whose blocks were gone at the lookup: such events are
useless."""


class Part(NamedTuple):
    """The claim of one data-parallel rank: `tokens`, up to the block `name`.

    `block` is that block itself: one that is removed and stored again is another one.
    """

    rank: int
    tokens: int
    block_tokens: int
    name: int
    block: Any


class Claim:
    """The claims of the instance `name` on a prompt when it was placed there.

    `parts`: of each of its ranks, as it is unknown which one serves. `root`: prompts with one root
    are one observation: of token ids (`is_of_ids`) the same prompt, of text the same conversation.
    """

    __slots__ = ("is_of_ids", "name", "parts", "root")

    def __init__(self, name: str, parts: Sequence[Part], root: int, *, is_of_ids: bool) -> None:
        self.name, self.parts, self.root, self.is_of_ids = name, parts, root, is_of_ids

    def is_met(self, cached_tokens: int) -> bool | None:
        """Whether an answer found as much as the smallest claim; None if that is nothing."""
        tokens = min([part.tokens for part in self.parts])
        blocks_tokens = SLACK_BLOCKS * max([part.block_tokens for part in self.parts])
        slack = max(blocks_tokens, int(SLACK_RATIO * tokens))
        return cached_tokens >= tokens - slack if tokens > slack else None


class Belief:
    """Whether an instance's events are trusted, by its claims so far. `is_lost`: they are not."""

    __slots__ = ("_gone", "_right", "_wrong", "is_lost")

    def __init__(self) -> None:
        self.is_lost = False
        self._wrong: dict[int, None] = {}
        self._gone = self._right = 0

    def gone(self) -> None:
        """Count a claim whose blocks were removed before the answer's prompt was looked up."""
        self._gone += 1
        self.is_lost = self.is_lost or self._gone >= BELIEVED_GONE

    def observe(self, root: int, *, is_right: bool) -> None:
        """Count a claim compared with an answer; a right one cancels a wrong one."""
        if not is_right:
            self._right = 0
            if not self.is_lost:
                self._wrong[root] = None
                self.is_lost = len(self._wrong) >= BELIEVED_WRONG
            return
        self._right += 1
        self._gone = 0
        if self.is_lost and self._right >= BELIEVED_RIGHT:
            self.is_lost, self._wrong = False, {}
        elif not self.is_lost and self._wrong:
            self._wrong.popitem()

    @property
    def is_whole(self) -> bool:
        """Whether no claim is wrong."""
        return not self.is_lost and not self._wrong and not self._gone
