"""Iterations of one engine: tokens of each, and the gaps between a stream's tokens, as vLLM counts.

vLLM 0.32 counts where outputs arrive. So a step that puts nothing out, as all but the last chunk of
a prompt, is not counted. The computed tokens of a prompt count at its first token, all at once. A
stream's gap is the time since its token before, a pause after a preemption included.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from replayer.engine.costs import DecodeRun
from replayer.engine.scheduler import Work

TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets, as vLLM has them."""
GAP_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class Spread:
    """A histogram: how many values are in each bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that came so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self._counts)

    def cumulated(self) -> Iterator[tuple[str, float]]:
        """Each bucket's upper bound as Prometheus writes it, and the values up to there."""
        below = 0
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for name, count in zip(names, self._counts, strict=True):
            below += count
            yield name, float(below)


class Iterations:
    """`tokens` of each step that put something out, and `gaps` between tokens in engine seconds."""

    def __init__(self) -> None:
        self.tokens, self.gaps = Spread(TOKEN_BOUNDS), Spread(GAP_BOUNDS)

    def count(self, work: Work, run: DecodeRun, steps: int) -> None:
        """Count the first `steps` steps of a run, before they are committed."""
        decodes = len(work.decodes)
        done = [r for r, tokens in work.chunks if r.computed_tokens + tokens == r.known_tokens]
        if not decodes and not done:
            return
        end_s = run.end_s(1)
        tokens = decodes
        for request in done:
            tokens += request.job.output_tokens > 0
            if request.first_token_s is None:
                tokens += request.prompt_computed_tokens
            else:
                self.gaps.observe(end_s - request.last_token_s)
            request.last_token_s = end_s
        self.tokens.observe(tokens)
        for request in work.decodes:
            self.gaps.observe(end_s - request.last_token_s)
        if steps > 1:
            self.tokens.observe(decodes, steps - 1)
            for number in range(1, steps):
                self.gaps.observe(run.first_s + number * run.growth_s, decodes)
            end_s = run.end_s(steps)
        for request in work.decodes:
            request.last_token_s = end_s
