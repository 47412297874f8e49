"""What another policy would have done with the same request at the same moment, and nothing more.

It sees the Scene that the decision saw and changes nothing: no charge, no session, no reservation.
So it is not a trial of that policy: the load it looks at is of the policy that decides.
"""

from __future__ import annotations

from dataclasses import replace

from proxy.core.decide import Choice, Decide, RouterConfig, Scene, predicted_ttft_s, route_class
from proxy.core.record import Shadowed


class Shadow:
    """A policy that only looks; `decide` is asked with `policy` in the place of the real one."""

    def __init__(self, policy: str, decide: Decide, config: RouterConfig) -> None:
        self.policy = policy
        self._decide = decide
        self._config = replace(config, offload_policy=policy)

    def look(self, scene: Scene, made: Choice) -> Shadowed:
        """What it would have done where `made` was done."""
        try:
            choice = self._decide(replace(scene, config=self._config))
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must not feel it
            return Shadowed(self.policy, error=f"{type(error).__name__}: {error}")
        d, p = choice.decode, choice.prefill
        return Shadowed(
            self.policy,
            d is made.decode and p is made.prefill,
            d.instance.name,
            p.instance.name if p else None,
            route_class(choice.size, offloaded=p is not None),
            choice.reason,
            predicted_ttft_s(scene, choice),
        )
