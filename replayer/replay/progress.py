"""The progress line of a run, drawn twice a second."""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from replayer.replay.client import ReplayOutcome
from replayer.replay.run import Result

RECENT = 64


class Tally:
    """Counts of a run so far, and its recent TTFTs."""

    def __init__(self, time_scale: float = 1.0) -> None:
        """Start at zero; the target's time runs `time_scale` times faster than real time."""
        self._time_scale = time_scale
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

    def ended(self, result: Result) -> None:
        """Count the outcome of a request."""
        if result.exchange is None:
            self.outcomes[ReplayOutcome.SKIPPED] += 1
            return
        self.outcomes[result.exchange.outcome] += 1
        self.refusal_count += result.exchange.refusals
        first_token_s = result.exchange.stream.first_token_s
        if first_token_s is not None:
            ttft_s = (first_token_s - result.exchange.sent_s) * self._time_scale
            self._recent_ttft_s.append(ttft_s)

    def line(self) -> str:
        """Describe the run in one line."""
        in_flight = self.sent_count - (self.ended_count - self.outcomes[ReplayOutcome.SKIPPED])
        failed = self.ended_count - self.outcomes[ReplayOutcome.OK]
        ttft = f"{median(self._recent_ttft_s):.3f} s" if self._recent_ttft_s else "-"
        refused = f"  refused {self.refusal_count}" if self.refusal_count else ""
        return f"in flight {in_flight}  not ok {failed}{refused}  TTFT p50 {ttft} (last {RECENT})"


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
