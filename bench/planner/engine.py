"""The simulated engine as rules and searches know it: sizes and speeds.

The constants are those of `bench.routing.engine`. The command writes them into each job, since
Dynamo's environment cannot import that module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.plan.measured import Record

BATCH = 48
"""Decodes in a batch, where work is counted."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine. `arguments`: the file with the arguments that the replay takes."""

    arguments: str
    kv_tokens: int
    step_tokens: int
    max_seqs: int
    prefill_base_s: float
    prefill_tps: float
    step_base_s: float
    step_s_per_kv_token: float

    def prefill_s(self, tokens: float) -> float:
        """The time of a step that computes so many tokens of prompts."""
        return self.prefill_base_s + tokens / self.prefill_tps

    def step_s(self, kv_tokens: float) -> float:
        """The time of a decode step over so many tokens of KV."""
        return self.step_base_s + self.step_s_per_kv_token * kv_tokens

    def work_s(self, one: Record) -> float:
        """The engine's time that a request takes in a batch of BATCH."""
        kv_tokens = one.input_tokens + one.output_tokens / 2
        token_s = self.step_base_s / BATCH + self.step_s_per_kv_token * kv_tokens
        new_tokens = one.input_tokens - one.reused_tokens
        return new_tokens / self.prefill_tps + one.output_tokens * token_s

    def replay_arguments(self, startup_s: float) -> dict[str, Any]:
        """The replay's `extra_engine_args`; a new engine serves after `startup_s`."""
        arguments: dict[str, Any] = json.loads(Path(self.arguments).read_text("utf-8"))
        return arguments | ({"startup_time": startup_s} if startup_s else {})
