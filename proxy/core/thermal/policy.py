"""An operator's own thermal policy: its methods, their inputs and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from proxy.core.thermal.victims import Victim

MISTAKES = (Exception,)
"""Exceptions of an operator's policy, which is foreign code. Law `p` then controls the instance."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The part of vLLM's `scheduler_config` that the founding document's policies read."""

    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The policy's view of vLLM's scheduler: its configuration and running requests."""

    scheduler_config: SchedulerConfig
    num_running: int
    num_waiting: int


class OperatorPolicy(Protocol):
    """An operator's own policy, with the methods of the founding document."""

    def get_max_running_seqs(self, scheduler: Scheduler) -> int:
        """The cap; kept within `min_cap` and `max_running`."""

    def select_victims(self, running: list[Victim], num_to_evict: int) -> list[Victim]:
        """The movable running requests to evict."""

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        """Called for every reading of a chip's temperature."""
