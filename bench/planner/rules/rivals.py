"""The rivals: laws that other projects publish for KEDA and the HPA, and Dynamo's planner.

Each has the settings that are tried; the best for a load counts.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.planner.rules.hpa import Behavior, Hpa, average_value, percent, pods
from bench.planner.rules.policy import Context, Iteration, Mean, Policy, Rule, Traffic, View
from bench.planner.rules.presets import EASY, SLA, Preset

PER_REPLICA = 16
"""llm-d's guides want so many running requests per replica."""
AT_ONCE = (percent(100, 15),)
BOTH_SLOW = Behavior(AT_ONCE, AT_ONCE, up_window_s=300.0)
"""Windows of five minutes both ways."""


class Autoscaler(Rule):
    """A law whose wish an HPA follows; KEDA polls its metrics every 15 s."""

    behavior = Behavior(up=AT_ONCE, down=AT_ONCE)

    def __init__(self, context: Context, behavior: Behavior | None = None) -> None:
        super().__init__(context)
        self._hpa = Hpa(behavior or self.behavior)

    @abstractmethod
    def wish(self, view: View) -> int:
        """The replicas that the metrics ask for."""

    def replicas(self, view: View) -> int:
        """The replicas that the HPA allows."""
        wish = self.context.bounded(self.wish(view))
        return self._hpa.step(view.now_s, max(1, view.wanted), wish)


class KedaInflight(Autoscaler):
    """llm-d's keda-epp guide: requests in flight per replica; up at once, down after 300 s."""

    def __init__(self, context: Context, running: float = PER_REPLICA) -> None:
        super().__init__(context)
        self._running = running

    def wish(self, view: View) -> int:
        """Running and queued requests, over the target."""
        return average_value(view.running + view.queued, self._running, view.wanted)


class KedaQueue(Autoscaler):
    """Its queue overlay: the larger of queued and of running requests per replica."""

    behavior = BOTH_SLOW

    def __init__(self, context: Context, running: float = PER_REPLICA, queued: float = 1.0) -> None:
        super().__init__(context)
        self._running, self._queued = running, queued

    def wish(self, view: View) -> int:
        """The larger wish."""
        waiting = average_value(view.queued, self._queued, view.wanted)
        return max(waiting, average_value(view.running, self._running, view.wanted))


class KedaSaturation(Autoscaler):
    """Its saturation overlay: mean of max(queue / 5, KV / 0.8) over 0.7; running requests too.

    As published, a mean over the pool is divided by the target, as if it were a sum. `pool` makes
    it one. `running` 0: without that metric.
    """

    behavior = BOTH_SLOW
    QUEUE, KV_RATIO, TARGET = 5.0, 0.8, 0.7

    def __init__(
        self,
        context: Context,
        running: float = PER_REPLICA,
        pool: bool = False,
    ) -> None:
        super().__init__(context)
        self._running, self._is_sum = running, pool

    def wish(self, view: View) -> int:
        """The larger wish."""
        mean = sum(map(self._saturation, view.engines)) / max(1, len(view.engines))
        total = mean * view.wanted if self._is_sum else mean
        wish = average_value(total, self.TARGET, view.wanted)
        if not self._running:
            return wish
        return max(wish, average_value(view.running, self._running, view.wanted))

    def _saturation(self, one: Iteration) -> float:
        kv_ratio = one.kv_tokens / self.context.kv_tokens
        return max(one.queued / self.QUEUE, kv_ratio / self.KV_RATIO)


class KedaTokens(Autoscaler):
    """llm-d's token-aware guide: seconds of prefill backlog, and KV in use.

    The backlog's target is the SLO less a mean prompt's prefill, 0.5 s at least, or `threshold`.
    One replica is added per 180 s, and one taken per 300 s.
    """

    KV_RATIO, LEAST_S = 0.8, 0.5

    def __init__(
        self,
        context: Context,
        threshold: float = 0.0,
        up_pods: int = 1,
        up_period: float = 180.0,
        down_period: float = 300.0,
    ) -> None:
        super().__init__(context, Behavior([pods(up_pods, up_period)], [pods(1, down_period)]))
        self._threshold_s = threshold
        self._isl_tokens = 0.0

    def wish(self, view: View) -> int:
        """The larger wish."""
        if view.traffic.isl_tokens.count:
            self._isl_tokens = view.traffic.isl_tokens.value
        speed = self.context.prefill_tps
        spare_s = self.context.slo_ttft_ms / 1000 - self._isl_tokens / speed
        target_s = self._threshold_s or max(self.LEAST_S, spare_s)
        backlog_s = view.backlog_tokens * (1 - view.traffic.hit_ratio.value) / speed
        caches = view.kv_tokens / self.context.kv_tokens
        return max(
            average_value(backlog_s, target_s, view.wanted),
            average_value(caches, self.KV_RATIO, view.wanted),
        )


class LlmdSlo(Autoscaler):
    """llm-d's SLO-aware guide: how far the p90 of TTFT and ITL is from the SLO.

    s is the mean over 45 s of min(max(p90 / SLO), 2). Above 0.55 the wish is n + ceil(n (s c / 0.55
    - 1)) with c = ready / n, below 0.40 n - floor(n (1 - s / 0.40)). The snapshot has means in
    place of p90: `tail` is their ratio, 2.3 for an exponential. `predicted` takes the TTFT that the
    queues promise, as llm-d's predictor would, in place of that of completed requests.
    """

    behavior = Behavior(
        up=(percent(100, 60), pods(4, 60)),
        down=(pods(1, 120),),
        up_window_s=30.0,
        down_window_s=180.0,
    )
    HIGH, LOW, MOST = 0.55, 0.40, 2.0
    MEANS_S, SIGNAL_S = 60.0, 45.0

    def __init__(
        self,
        context: Context,
        tail: float = 1.5,
        predicted: bool = False,
    ) -> None:
        super().__init__(context)
        self._tail, self._is_predicted = tail, predicted
        self._traffic: deque[tuple[float, Traffic]] = deque()
        self._signals: deque[tuple[float, float]] = deque()

    def wish(self, view: View) -> int:
        """The wish that the signal makes."""
        self._traffic.append((view.now_s, view.traffic))
        while self._traffic[0][0] <= view.now_s - self.MEANS_S:
            self._traffic.popleft()
        self._signals.append((view.now_s, min(self._strain(view), self.MOST)))
        while self._signals[0][0] <= view.now_s - self.SIGNAL_S:
            self._signals.popleft()
        signal = sum(value for _, value in self._signals) / len(self._signals)
        return self.wished(signal, view.ready, max(1, view.wanted))

    def wished(self, signal: float, ready: int, n: int) -> int:
        """The wish of n replicas at a signal; those that start already are credited."""
        if signal > self.HIGH:
            return n + max(0, math.ceil(n * (signal * (ready / n) / self.HIGH - 1) - 1e-9))
        if signal < self.LOW:
            return n - math.floor(n * (1 - signal / self.LOW))
        return n

    def _strain(self, view: View) -> float:
        """The larger of TTFT and ITL, in units of its SLO."""
        ttft_ms = self._promised_ms(view) if self._is_predicted else self._tail_ms("ttft_ms")
        itl_ms = self._tail_ms("itl_ms")
        return max(ttft_ms / self.context.slo_ttft_ms, itl_ms / self.context.slo_itl_ms)

    def _tail_ms(self, name: str) -> float:
        return self._tail * self._mean(name)

    def _mean(self, name: str) -> float:
        return Mean.together(getattr(one, name) for _, one in self._traffic).value

    def _promised_ms(self, view: View) -> float:
        """The p90 over engines of what a mean prompt would wait for and take."""
        new_ratio = 1 - self._mean("hit_ratio")
        waits = sorted(
            one.queued_prefill_tokens * new_ratio + one.prefill_tokens for one in view.engines
        ) or [0.0]
        wait = waits[min(len(waits) - 1, int(0.9 * len(waits)))]
        return 1000 * (wait + self._mean("isl_tokens") * new_ratio) / self.context.prefill_tps


class HpaKv(Autoscaler):
    """A usual HPA with Kubernetes' own limits: KV in use, and queued requests per replica."""

    behavior = Behavior(up=(percent(100, 15), pods(4, 15)), down=AT_ONCE)

    def __init__(self, context: Context, kv: float = 0.7, queued: float = 2.0) -> None:
        super().__init__(context)
        self._kv_ratio, self._queued = kv, queued

    def wish(self, view: View) -> int:
        """The larger wish."""
        caches = view.kv_tokens / self.context.kv_tokens
        return max(
            average_value(caches, self._kv_ratio, view.wanted),
            average_value(view.queued, self._queued, view.wanted),
        )


Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rival:
    """A rule, and the settings that are tried."""

    make: Callable[..., Policy]
    settings: Sequence[Settings]


RUNNING: Sequence[Settings] = [{"running": 16}, {"running": 32}, {"running": 64}]
RIVALS: dict[str, Rival] = {
    "keda-inflight": Rival(KedaInflight, RUNNING),
    "keda-queue": Rival(KedaQueue, RUNNING),
    "keda-saturation": Rival(KedaSaturation, [*RUNNING[:2], {"running": 0, "pool": True}]),
    "keda-tokens": Rival(
        KedaTokens,
        [{}, {"threshold": 1.5}, {"up_pods": 4, "up_period": 60, "down_period": 120}],
    ),
    "llmd-slo": Rival(
        LlmdSlo,
        [{"tail": 1.0}, {"tail": 1.5}, {"tail": 2.3}, {"tail": 1.5, "predicted": True}],
    ),
    "hpa-kv": Rival(HpaKv, [{"kv": 0.7}, {"kv": 0.5}, {"kv": 0.35}]),
    **{f"dynamo-{name}": Rival(Preset, [{"preset": name}]) for name in (*EASY, *SLA)},
}
