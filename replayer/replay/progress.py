"""The progress line of a run, drawn twice a second."""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from statistics import median

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from replayer.replay.client import NO_CONNECTION, ReplayOutcome, TimedExchange
from replayer.replay.run import Result

RECENT = 64
FIRST_IN_VAIN = 5
"""Number of final answers, none of them ok, that end a run."""
FIRST_FAILED = 20
"""The same for failures of any kind."""
MAY_PASS = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
NO_ANSWER = (ReplayOutcome.OK, ReplayOutcome.SKIPPED, ReplayOutcome.INTERRUPTED)


class Tally:
    """Counts of a run so far, and its recent TTFTs."""

    def __init__(self, time_scale: float = 1.0, max_failures: int = 0) -> None:
        """Start at zero; the target's time runs `time_scale` times faster than real time.

        `max_failures`: the number of requests that may fail before a run is without a chance.
        """
        self._time_scale, self._max_failures = time_scale, max_failures
        self._in_vain = 0
        self.sent_count = self.refusal_count = 0
        self.outcomes: Counter[ReplayOutcome] = Counter()
        self._recent_ttft_s: deque[float] = deque(maxlen=RECENT)

    @property
    def ended_count(self) -> int:
        """Count the requests with an outcome, skipped ones included."""
        return self.outcomes.total()

    def sent(self) -> None:
        """Count one more request sent."""
        self.sent_count += 1

    def ended(self, result: Result) -> str | None:
        """Count the outcome of a request; returns why the run has no chance, if it has none."""
        if result.exchange is None:
            self.outcomes[ReplayOutcome.SKIPPED] += 1
            return None
        self.outcomes[result.exchange.outcome] += 1
        self._in_vain += _is_in_vain(result.exchange)
        self.refusal_count += result.exchange.refusals
        first_token_s = result.exchange.stream.first_token_s
        if first_token_s is not None:
            ttft_s = (first_token_s - result.exchange.sent_s) * self._time_scale
            self._recent_ttft_s.append(ttft_s)
        return self._hopeless()

    def _hopeless(self) -> str | None:
        """Say that none of the first answers is ok, and that no later one will be."""
        failed = sum(self.outcomes[one] for one in ReplayOutcome if one not in NO_ANSWER)
        if self.outcomes[ReplayOutcome.OK] or failed <= self._max_failures:
            return None
        if self._in_vain < FIRST_IN_VAIN and failed < FIRST_FAILED:
            return None
        return f"stopped: none of the first {failed} answers is ok"

    def line(self) -> str:
        """Describe the run in one line."""
        in_flight = self.sent_count - (self.ended_count - self.outcomes[ReplayOutcome.SKIPPED])
        failed = self.ended_count - self.outcomes[ReplayOutcome.OK]
        ttft = f"{median(self._recent_ttft_s):.3f} s" if self._recent_ttft_s else "-"
        refused = f"  refused {self.refusal_count}" if self.refusal_count else ""
        return f"in flight {in_flight}  not ok {failed}{refused}  TTFT p50 {ttft} (last {RECENT})"


def _is_in_vain(exchange: TimedExchange) -> bool:
    """Whether an answer says that the same will come again: a refusal as wrong, or no server."""
    if exchange.outcome is ReplayOutcome.HTTP_ERROR:
        return 400 <= (exchange.status or 0) < 500 and exchange.status not in MAY_PASS
    if exchange.outcome is ReplayOutcome.TIMEOUT:  # a slow engine may get faster
        return exchange.error == NO_CONNECTION
    return exchange.outcome is ReplayOutcome.DISCONNECT_BEFORE_FIRST and exchange.status is None


class ProgressLine(Progress):
    """A progress bar that reads a tally each time it is drawn."""

    def __init__(self, console: Console, tally: Tally, total: int) -> None:
        """Draw on `console`, which must be a terminal for the line to move."""
        self._tally = tally
        columns = (
            TextColumn("replay"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[line]}"),
        )
        super().__init__(*columns, console=console, refresh_per_second=2, transient=True)
        self.add_task("replay", total=total, line="")

    def get_renderable(self) -> RenderableType:
        """Read the tally and lay out the line; rich calls this at every drawing."""
        for task in self.tasks:
            self.update(task.id, completed=self._tally.ended_count, line=self._tally.line())
        return super().get_renderable()


@contextmanager
def shown(console: Console, tally: Tally, total: int, *, live: bool) -> Iterator[None]:
    """Show a run's progress while the block runs."""
    if not live:
        yield
        return
    with ProgressLine(console, tally, total):
        yield
