"""The most answers that any admission could get from a fleet by a horizon, if it knew everything.

A bound, not a rule that is played. Each request is charged the least that an engine must compute
for it: the tokens that no cache could have, once, and its decode steps. Of a step's fixed time a
stream pays its part among the most streams that an engine runs. The engines' time is one pot that
can be dealt in any portion. Caches are endless, and no SLO has to be kept. What came at time t has
the time from t to the horizon only: Moore and Hodgson's rule, with time turned around, gives the
greatest number of requests that fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from analysis.league.fleet import EngineFleet
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import Planned
from replayer.virtual.load import TraceTurn


def least_work_s(turn: TraceTurn, engine: EngineOptions) -> float:
    """Return the least seconds of an engine that a request takes."""
    step, new, prompt = engine.step, turn.new_tokens, turn.prompt_tokens
    pairs = new * (prompt - new) + new * new / 2
    decodes = max(0, turn.output_tokens - 1)
    read = decodes * prompt + decodes * (decodes - 1) / 2
    each_s = step.a2 + (step.a0 + step.token_s) / engine.max_num_seqs
    return step.a1 * new + step.a4 * pairs + decodes * each_s + step.a3 * read


def most_answers(planned: Sequence[Planned], fleet: EngineFleet, horizon_s: float) -> int:
    """Return the greatest number of requests whose least work fits before the horizon.

    A session's next turn comes at the earliest when the one before took no time at all.
    """
    kinds = set(fleet.engines)
    ready_s: list[float] = []
    jobs: list[tuple[float, float]] = []
    for one in planned:
        after_s = max([ready_s[other] + one.delay_s for other in one.wait_for], default=0.0)
        ready_s.append(max(one.earliest_s, after_s))
        work_s = min(least_work_s(one.turn, kind) for kind in kinds)
        jobs.append((len(fleet.engines) * (horizon_s - ready_s[-1]), work_s))
    taken: list[float] = []
    total_s = 0.0
    for room_s, work_s in sorted(jobs):
        heapq.heappush(taken, -work_s)
        total_s += work_s
        if total_s > room_s:
            total_s += heapq.heappop(taken)
    return len(taken)
