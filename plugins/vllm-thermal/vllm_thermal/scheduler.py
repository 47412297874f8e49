"""vLLM's scheduler with a cap that can be changed while it runs.

`vllm serve --scheduler-cls vllm_thermal.scheduler.ThermalScheduler`. A request above the cap is
preempted as vLLM itself preempts one for lack of KV blocks: it waits, and is computed again from
its prompt and what it has generated, most of which the prefix cache still has.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from vllm_thermal.control import Control, Running, ranked
from vllm_thermal.policy import NAME, PolicyDriver, policy_named
from vllm_thermal.readings import Readings, reader

log = logging.getLogger("vllm.thermal")


class ThermalScheduler(AsyncScheduler):
    """The default scheduler, asked before each step how many requests may run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Before 0.31 there is one number for the cap and for the model runner's slots.
        self._has_own_cap = hasattr(self, "max_num_active_reqs")
        cap = self.max_num_active_reqs if self._has_own_cap else self.max_num_running_reqs
        self._tokens_per_request = 1 + getattr(self, "num_spec_tokens", 0)
        self.thermal = Control(
            cap,
            self.max_num_scheduled_tokens,
            self.block_size,
            _needs_whole_steps(self.scheduler_config),
        )
        self._drops_stale = (
            "drop_stale_output" in inspect.signature(self._preempt_request).parameters
        )
        self._driver = _driver(self.parallel_config)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the cap, then schedule as ever."""
        now_s = time.monotonic()
        control = self.thermal
        policy_cap = None if self._driver is None else self._driver.cap(self)
        count = control.begin_step(now_s, len(self.running), policy_cap)
        preempted, skipped = self._preempt(count, now_s) if count else (0, 0)
        control.end_choice(len(self.running), preempted, skipped)
        self._limit(control)
        output = super().schedule(*args, **kwargs)
        self._stamp(output.num_scheduled_tokens, control.steps)
        return output

    def shutdown(self) -> None:
        """Stop reading temperatures too."""
        if self._driver is not None:
            self._driver.close()
        super().shutdown()

    def thermal_set(self, body: object) -> dict[str, Any]:
        """Change the limits; raises WishError. In force from the next step on."""
        before = self.thermal.wish
        self.thermal.change(body, time.monotonic(), len(self.running))
        if self.thermal.wish != before:
            log.info("limits: %s", self.thermal.wish)
        return self.thermal_get()

    def thermal_get(self) -> dict[str, Any]:
        """Limits, and what runs."""
        status = self.thermal.status(time.monotonic(), *self.get_request_counts())
        policy = None if self._driver is None else self._driver.status()
        return status | {"kv_usage": self.kv_cache_manager.usage, "policy": policy}

    def _limit(self, control: Control) -> None:
        if self._has_own_cap:
            self.max_num_active_reqs = control.cap()
        else:
            # vLLM asserts that no more run than this at the end of each step.
            self.max_num_running_reqs = max(control.cap(), len(self.running))
        self.max_num_scheduled_tokens = control.tokens(len(self.running), self._tokens_per_request)

    def _preempt(self, count: int, now_s: float) -> tuple[int, int]:
        """Send `count` running requests back to the queue: how many went, how many could not."""
        movable = [r for r in self.running if self._may_preempt(r)]
        chosen = list(self._chosen(movable, min(count, len(movable))))[:count]
        for request in chosen:
            self.running.remove(request)
            # As vLLM's own preemption: a connector must not deliver what has lost its KV.
            stale = {"drop_stale_output": self.requires_kv_delivery} if self._drops_stale else {}
            self._preempt_request(request, now_s, **stale)
        return len(chosen), count - len(chosen)

    def _may_preempt(self, request: Any) -> bool:
        """Whether it can give way in this step; else in a later one.

        Where a KV connector could be given blocks that a step under way still writes, vLLM keeps
        them back until that step is over. Versions that cannot must not free them before: with
        a step always under way, as under async scheduling, they would hold every victim for ever.
        """
        if request.status != RequestStatus.RUNNING:
            return False
        if hasattr(self, "deferred_frees"):
            return True
        can_be_freed = getattr(self, "_request_blocks_can_be_freed", None)
        return can_be_freed is None or bool(can_be_freed(request))

    def _chosen(self, movable: list[Any], count: int) -> Iterable[Any]:
        """Who gives way: by the policy where it is what limits, else as it was asked."""
        if self._driver is not None and self.thermal.is_by_policy:
            wanted = {id(r) for r in self._driver.select_victims(movable, count)}
            return (r for r in movable if id(r) in wanted)
        by_id = {r.request_id: r for r in movable}
        order = ranked([_running(r) for r in movable], self.thermal.wish.victim)
        return (by_id[r.request_id] for r in order[:count])

    def _stamp(self, scheduled: Iterable[str], step: int) -> None:
        """Note on each request when it last got tokens; that ends with the request."""
        requests = self.requests
        for request_id in scheduled:
            requests[request_id].thermal_step = step


def _needs_whole_steps(config: Any) -> str | None:
    """Why a step must have its full budget: else some prompt might never fit into one."""
    if not config.enable_chunked_prefill:
        return "chunked prefill is off (--enable-chunked-prefill)"
    if getattr(config, "disable_chunked_mm_input", False):
        return "inputs of other kinds than text are not chunked (--disable-chunked-mm-input)"
    return None


def _running(request: Any) -> Running:
    return Running(
        request.request_id,
        request.arrival_time,
        request.num_computed_tokens,
        request.num_output_tokens,
        request.max_tokens,
        request.priority,
        getattr(request, "thermal_step", 0),
    )


def _driver(parallel: Any) -> PolicyDriver | None:
    """The policy that the environment names; raises PolicyError or ReadingError."""
    name = os.environ.get(NAME)
    if not name:
        return None
    policy = policy_named(name)
    local_rank = getattr(parallel, "data_parallel_rank_local", None) or 0
    read = reader(os.environ, parallel.world_size, local_rank)
    return PolicyDriver(name, policy, Readings(read, time.monotonic), time.monotonic)
