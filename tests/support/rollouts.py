"""Conversations in token ids, as training rollouts have them: each turn brings back all before."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.support.harness import ServedProxy

COMPLETIONS = "/v1/completions"


@dataclass
class Rollout:
    """One session; `name` also makes its ids its own. Ids are `low` to `high`."""

    name: str
    first_tokens: int = 600
    turn_tokens: tuple[int, int] = (20, 300)
    max_tokens: int = 40
    low: int = 3000
    high: int = 4000
    body: Mapping[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    turns: int = 0

    async def turn(self, proxy: ServedProxy) -> None:
        """One more turn, whose answer is remembered; the request's id is NAME-TURN."""
        pick = random.Random(f"{self.name}-{self.turns}")
        length = pick.randint(*self.turn_tokens) if self.turns else self.first_tokens
        self.ids += [pick.randrange(self.low, self.high) for _ in range(length)]
        body = {"prompt": self.ids, "max_tokens": self.max_tokens, "return_token_ids": True}
        body |= {"temperature": 0, "ignore_eos": True, **self.body}
        headers = {"X-Session-ID": self.name, "X-Request-Id": f"{self.name}-{self.turns}"}
        answer = await proxy.post(body, COMPLETIONS, headers=headers)
        assert answer.status == 200, answer.body
        self.turns += 1
        self.ids += orjson.loads(answer.body)["choices"][0]["token_ids"]


def blocks_off(record: Mapping[str, Any], block_tokens: int) -> int:
    """How far the predicted hit was from what the engine found, in its blocks."""
    difference = abs(record["hit_tokens"] - record["cached_tokens"])
    assert difference % block_tokens == 0
    return int(difference // block_tokens)
