"""What caches without an end would give, from the engines' own constants and without a network.

Two rows stand beside the measured ones:

- `alone`: a bound that no router can pass. All engines share one cache that never evicts, and each
  request has an engine for itself: its TTFT is the prefill of the tokens that no earlier request of
  the work had, its TPOT the step of its own KV.
- `endless caches`: what engines come to that evict nothing. The project's router places the work on
  as many engine models with these constants, in virtual time; they queue, and prefills delay
  decodes, as in the real run. It is no bound: another placement may be better.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from bench.routing.engine import (
    BATCHED_TOKENS,
    PREFILL_BASE_S,
    PREFILL_TPS,
    SEQUENCES,
    STEP_BASE_S,
    STEP_S_PER_KV_TOKEN,
)
from bench.routing.load import THINK_CAP_S, Work
from bench.routing.measured import Answered, Run
from bench.routing.runs import Cell
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.types import RouterConfig
from replayer.engine.costs import StepCost
from replayer.engine.types import EngineOptions
from replayer.replay.plan import ideal_hits
from replayer.trace.loaders import TraceRequest, block_ids
from replayer.virtual.arrivals import SlotRules, plan_slots
from replayer.virtual.fleet import simulate
from replayer.virtual.load import as_source
from replayer.virtual.requests import VirtualOptions

ALONE, ENDLESS = "alone", "endless caches"
PATIENCE_S = 3_600.0
"""Of the virtual clients: they wait for every answer."""


STEP = StepCost(
    a0=0.0,
    a1=1.0 / PREFILL_TPS,
    a2=0.0,
    a3=STEP_S_PER_KV_TOKEN,
    a4=0.0,
    prefill_s=PREFILL_BASE_S,
    token_s=STEP_BASE_S,
)


def bounds(cell: Cell, work: Work) -> list[Run]:
    """Both rows of a cell."""
    return [alone(cell, work), endless(cell, work)]


def alone(cell: Cell, work: Work) -> Run:
    """The row `alone`."""
    hits = ideal_hits(work.requests)
    free_s = [THINK_CAP_S * slot / work.at_a_time for slot in range(work.at_a_time)]
    heapq.heapify(free_s)
    answered, makespan_s = [], 0.0
    for session in work.sessions:
        now_s = heapq.heappop(free_s)
        for request in session:
            one = _alone(request, hits[request.request_id])
            answered.append(one)
            service_s = one.ttft_s + one.tpot_s * (request.output_tokens - 1)
            now_s += (request.delay_s or 0.0) + service_s
        heapq.heappush(free_s, now_s)
        makespan_s = max(makespan_s, now_s)
    return _row(cell, work, ALONE, answered, makespan_s)


def _alone(request: TraceRequest, cached_tokens: int) -> Answered:
    prompt_tokens = request.input_tokens or 0
    # An engine computes the last token at least, whatever it has cached.
    cached_tokens = min(cached_tokens, prompt_tokens - 1)
    new_tokens = prompt_tokens - cached_tokens
    steps = -(-new_tokens // BATCHED_TOKENS)
    ttft_s = steps * PREFILL_BASE_S + new_tokens / PREFILL_TPS
    tpot_s = STEP_BASE_S + STEP_S_PER_KV_TOKEN * prompt_tokens
    return Answered(request.session_id or "", ttft_s, tpot_s, prompt_tokens, cached_tokens)


def endless(cell: Cell, work: Work) -> Run:
    """The row `endless caches`."""
    requests = work.requests
    block_tokens = requests[0].block_tokens
    source = as_source(requests, block_tokens)
    slots = SlotRules(work.at_a_time, len(work.sessions), cell.seed, THINK_CAP_S, THINK_CAP_S)
    blocks = _blocks(requests, block_tokens)
    engine = EngineOptions(
        block_size=block_tokens,
        num_blocks=blocks,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_num_seqs=SEQUENCES,
        max_model_len=blocks * block_tokens,
        step=STEP,
    )
    config = RouterConfig(prefill_throughput=PREFILL_TPS, kv_connector="none")
    options = VirtualOptions((engine,) * cell.shape.engines, block_tokens, timeout_s=PATIENCE_S)
    run = simulate(plan_slots(source, slots), Router(FleetState(config)), options)
    answered = [
        Answered(row.session_id, row.ttft_s, row.tpot_s, row.prompt_tokens, row.cached_tokens)
        for row in run.rows
        if row.ttft_s is not None and row.tpot_s is not None
    ]
    # Here sessions are dealt to slots in advance, so the end of the run would say nothing.
    return _row(cell, work, ENDLESS, answered)


def _blocks(requests: Sequence[TraceRequest], block_tokens: int) -> int:
    """Blocks that one engine never has to evict any of, were it given all the requests."""
    different = len({block for request in requests for block in block_ids(request.runs)})
    answers = sum(-(-request.output_tokens // block_tokens) + 1 for request in requests)
    return different + answers + len(requests)


def _row(
    cell: Cell,
    work: Work,
    name: str,
    answered: Sequence[Answered],
    makespan_s: float | None = None,
) -> Run:
    sent = len(work.requests)
    return Run(
        shape=cell.shape.name,
        load=cell.load,
        seed=cell.seed,
        system=name,
        sent=sent,
        lost=sent - len(answered),
        answered=tuple(answered),
        makespan_s=makespan_s,
        is_bound=True,
    )
