"""Conversations as agents have them: each turn brings back all that was said, and more."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.real_vllm.rig import CHAT, ask, words
from tests.support.harness import Answer, ServedProxy


@dataclass
class Conversation:
    """One session; `name` also makes its text its own."""

    name: str
    first_words: int
    turn_words: tuple[int, int] = (50, 400)
    max_tokens: int = 32
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def turn(self, proxy: ServedProxy) -> Answer:
        """Say something and remember the answer; the request's id is NAME-TURN."""
        number = len(self.messages) // 2
        length = random.Random(f"{self.name}-{number}").randint(*self.turn_words)
        said = words(length if number else self.first_words, f"{self.name}-{number}")
        self.messages.append({"role": "user", "content": said})
        body = ask(CHAT, "", stream=True, max_tokens=self.max_tokens)
        headers = {"X-Session-ID": self.name, "X-Request-Id": f"{self.name}-{number}"}
        answer = await proxy.post(body | {"messages": self.messages}, CHAT, headers=headers)
        assert answer.status == 200, answer.body
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer


def error_ratio(record: dict[str, Any]) -> float:
    """How far the predicted hit was from what the engine found, as a part of the prompt."""
    return float(abs(record["hit_tokens"] - record["cached_tokens"]) / record["prompt_tokens"])


def mean(values: list[float]) -> float:
    """Their mean; there must be some."""
    return sum(values) / len(values)
