"""Bytes of prompt per token, and tokens per image or sound, by model: learned from usage.

The fleet's ratio is the median of the instances' own, so that one that is wrong does not move it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, TypeVar

from proxy.core.accounts.engine_reports import OwnRatio, fleet_ratio
from proxy.core.accounts.instances import InstanceStates
from proxy.core.types import BYTES_PER_TOKEN_PRIOR, MEDIA_PRIOR

LEAST_RATIO, MOST_RATIO = 0.25, 64.0
"""Bounds of what is plausible; whatever an engine reports is clipped to them."""
LEAST_TOKENS, LEAST_BYTES = 64, 1024
"""A shorter prompt is mostly template."""
MODELS_MAX: Final = 64
LEAST_MEDIA_RATIO: Final = 0.2
"""Media teach where they are at least this part of the text: less drowns in the text's error."""
MEDIA_GAIN: Final = 0.3
MOST_MEDIA_TOKENS: Final = 65_536.0
_Value = TypeVar("_Value")


class BytesPerToken:
    """The ratios of the fleet; the instances' own are a part of their states."""

    def __init__(self, states: InstanceStates) -> None:
        self._states = states
        self._fleet: OrderedDict[str, float] = OrderedDict()
        self._adopted: OrderedDict[str, float] = OrderedDict()
        self._media: OrderedDict[str, dict[str, float]] = OrderedDict()

    def of(self, model: str) -> float:
        """The fleet's ratio, or the prior for a model without answers."""
        return self._fleet.get(model, BYTES_PER_TOKEN_PRIOR)

    def all(self) -> dict[str, float]:
        """The fleet's ratios, by model."""
        return dict(self._fleet)

    def adopt(self, model: str, ratio: float) -> None:
        """Start with the ratio that another process has learned, unless there is one."""
        if LEAST_RATIO <= ratio <= MOST_RATIO and model not in self._fleet:
            _keep(self._fleet, model, ratio)
            _keep(self._adopted, model, ratio)

    def learn(self, model: str, instance: str, prompt_bytes: int, prompt_tokens: int) -> bool:
        """Learn from an answer's `usage.prompt_tokens`.

        True if the instance has become doubted by it, or has ceased to be.
        """
        state = self._states.get(instance)
        if state is None or prompt_tokens < LEAST_TOKENS or prompt_bytes < LEAST_BYTES:
            return False
        adopted, ratios = self._adopted.get(model), state.bytes_per_token
        own = ratios.get(model) or OwnRatio(adopted)
        is_due = own.observe(min(MOST_RATIO, max(LEAST_RATIO, prompt_bytes / prompt_tokens)))
        _keep(ratios, model, own)
        if not is_due and model in self._fleet:
            self._fleet.move_to_end(model)
            return False
        known = [r for s in self._states if (r := s.bytes_per_token.get(model)) is not None]
        fleet = fleet_ratio(known, BYTES_PER_TOKEN_PRIOR if adopted is None else adopted)
        _keep(self._fleet, model, fleet)
        return own.judge(fleet, len(known))

    def media(self, model: str, kind: str) -> float:
        """Tokens of one image, or what else `kind` says."""
        return self._media.get(model, MEDIA_PRIOR).get(kind, MEDIA_PRIOR[kind])

    def learn_media(
        self, model: str, kinds: Mapping[str, int], text_bytes: int, prompt_tokens: int
    ) -> None:
        """Learn from a prompt with so many media of each kind: their tokens are the text's rest.

        Kinds that come together are taken to be wrong by the same factor.
        """
        text = text_bytes / self.of(model)
        rest = max(float(sum(kinds.values())), prompt_tokens - text)
        expected = sum([number * self.media(model, kind) for kind, number in kinds.items()])
        if max(rest, expected) < LEAST_MEDIA_RATIO * text:
            return
        known = dict(self._media.get(model, {}))
        for kind in kinds:
            gain = MEDIA_GAIN if kind in known else 1.0
            told = self.media(model, kind) * (rest / expected) ** gain
            known[kind] = min(MOST_MEDIA_TOKENS, max(1.0, told))
        _keep(self._media, model, known)


def _keep(by_model: OrderedDict[str, _Value], model: str, value: _Value) -> None:
    """Store a model's value as the most recently used one; the oldest is dropped."""
    by_model[model] = value
    by_model.move_to_end(model)
    if len(by_model) > MODELS_MAX:
        by_model.popitem(last=False)
