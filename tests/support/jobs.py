"""Jobs for the engine model, and how to run them."""

import math

from replayer.engine.costs import StepCost
from replayer.engine.engine import Engine
from replayer.engine.types import EngineOptions, Event, Job

COST = StepCost(a0=0.01, a1=1e-4, a2=1e-3, a3=1e-6, a4=1e-8)
SMALL = EngineOptions(
    block_size=4, num_blocks=64, max_num_batched_tokens=32, max_model_len=256, step=COST
)


def make_job(name: str, prompt: int, output: int, *, chain: int = 0, block: int = 4) -> Job:
    """Make a job; jobs of one `chain` share their prefix, outputs included."""
    hashes = [chain * 10_000 + index for index in range(1_000)]
    full = prompt // block

    def output_hashes(tokens: int) -> list[int]:
        return hashes[full : (prompt + tokens) // block]

    return Job(name, prompt, hashes[:full], output, output_hashes=output_hashes)


def finish(engine: Engine, now_s: float = 0.0) -> list[Event]:
    events = []
    while now_s < math.inf:
        events += engine.advance(now_s)
        now_s = engine.next_event_s()
    return events
