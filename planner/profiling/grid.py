"""What the self-benchmark sends: lengths of prompts, contexts and numbers of streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replayer.arguments import InputError

LEAST_TOKENS = 128
SHARE = 0.9
"""Of the engine's longest length, and of its KV: what is sent leaves room for answers."""
GROWTH_TOKENS = 256
"""What a stream may generate until all the others beside it have begun."""
OUTPUT_TOKENS = 32
"""Tokens of the stream that is measured, beside all others of its point."""


@dataclass(frozen=True, slots=True)
class GridOptions:
    """How finely to measure, and how far.

    `max_length`: of prompts and contexts; None: as long as the engine allows.
    """

    prefill_granularity: int = 16
    decode_granularity: int = 6
    max_num_seqs: int = 256
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """The points, in the order in which they are measured: prompts, then contexts with batches.

    Lengths grow by a factor, since most prompts are far shorter than the longest. The largest batch
    of a context comes first: a prefix cache then has the prompts of all smaller ones.
    """

    prompts: tuple[int, ...]
    streams: tuple[tuple[int, int], ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; of a context those of the largest batch."""
        first = dict(reversed(self.streams))
        return sum(self.prompts) + sum(context * batch for context, batch in first.items())

    def expected_s(self, prefill_tps: float, step_s: float) -> float:
        """Seconds that all points will take, at the rate and the step of one short request."""
        return self.prompt_tokens / prefill_tps + len(self.streams) * 2 * OUTPUT_TOKENS * step_s


def grid_of(options: GridOptions, max_model_len: int, kv_tokens: int) -> Grid:
    """Lay out the points for an engine; raises InputError where it has no room for any."""
    longest = int(SHARE * min(max_model_len, kv_tokens))
    if options.max_length is not None:
        longest = min(longest, options.max_length)
    deepest = min(longest, int(SHARE * kv_tokens) - GROWTH_TOKENS, max_model_len - GROWTH_TOKENS)
    if deepest < 2 * LEAST_TOKENS:
        raise InputError(
            f"contexts must reach {2 * LEAST_TOKENS} tokens: the engine takes {max_model_len} "
            f"tokens and has KV for {kv_tokens}, and --max-length is {options.max_length}"
        )
    contexts = _spread(LEAST_TOKENS, deepest, options.decode_granularity)
    return Grid(
        tuple(_spread(LEAST_TOKENS, longest, options.prefill_granularity)),
        tuple(
            (context, batch)
            for context in contexts
            for batch in reversed(_batches(context, options, kv_tokens))
        ),
    )


def _batches(context: int, options: GridOptions, kv_tokens: int) -> list[int]:
    most = int(SHARE * kv_tokens / (context + GROWTH_TOKENS))
    return _spread(1, max(1, min(options.max_num_seqs, most)), options.decode_granularity)


def _spread(least: int, most: int, count: int) -> list[int]:
    """Whole numbers from `least` to `most`, each the same multiple of the one before."""
    return sorted({round(float(one)) for one in np.geomspace(least, most, count)})
