"""Predicted against cached tokens: users of real clients, and of forms that nobody has seen yet."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from proxy.core.types import BYTES_PER_TOKEN_PRIOR
from proxy.protocol.prompt.facts import BLOCK_BYTES
from replayer.simulator import messages
from tests.support.clients import CLIENTS
from tests.support.harness import proxied
from tests.support.users import Change, Served, served, sessions_of

OFTEN = ("claude-code-cch-2.1.119", "codex-0.171.0", "opencode-1.18.33")
"""Clients that are looked at in each run of the tests; the others take as long again."""
USERS = [f"user{at}" for at in range(8)]
ENGINE = {"max_model_len": 100_000}


def largest(errors: Iterable[Served], turns: range) -> float:
    return max(one.error for one in errors if one.turn in turns)


def is_near(one: Served) -> bool:
    """Whether a prediction is within 5 % of the prompt, or of a moved session within a key's block.

    Where a session has not been before only the key predicts, and the prompts are short here.
    """
    record = one.record
    off_bytes = abs(record["hit_tokens"] - record["cached_tokens"]) * BYTES_PER_TOKEN_PRIOR
    return one.error < 0.05 or (record["rehomed"] and off_bytes <= BLOCK_BYTES)


def unexplained(found: Sequence[Served]) -> list[str]:
    """Requests that went elsewhere than the one before, without a word in the log."""
    last: dict[tuple[str, int], str] = {}
    odd = []
    for one in found:
        place = one.record["decode_instance"]
        before = last.setdefault((one.user, one.agent), place)
        last[one.user, one.agent] = place
        if place != before and not one.record["rehomed"]:
            odd.append(one.record["request_id"])
    return odd


@pytest.mark.parametrize(
    "client",
    [
        client if client in OFTEN else pytest.param(client, marks=pytest.mark.figures)
        for client in CLIENTS
    ],
)
async def test_real_clients(tmp_path: Path, client: str) -> None:
    async with proxied(tmp_path, 3, sim=ENGINE) as (proxy, _):
        found = await served(proxy, sessions_of(client)[0], USERS)
        assert median(one.error for one in found) <= 0.01
        assert not unexplained(found)
        await proxy.at_rest()


@pytest.mark.parametrize("client", OFTEN)
async def test_a_switch_of_effort_harms_nobody_else(tmp_path: Path, client: str) -> None:
    def switching(turn: int, body: dict[str, Any]) -> None:
        effort = "low" if turn % 3 == 2 else "high"
        if "input" in body:
            body["reasoning"] = {"effort": effort}
        elif "system" in body:
            body["output_config"] = {"effort": effort}
        else:
            body["reasoning_effort"] = effort

    async with proxied(tmp_path, 3, sim=ENGINE) as (proxy, _):
        session = sessions_of(client)[0]
        found = await served(proxy, session, USERS[:4], {USERS[0]: switching})
        others = [one for one in found if one.user != USERS[0] and one.turn > 1]
        assert max(one.error for one in others) < 0.05
        switched = [one for one in found if one.user == USERS[0] and one.turn > 1]
        assert median(one.error for one in switched) < 0.05


class TestInventedForms:
    """A line in front of the system text that is another one in each request."""

    LINE = "x-invented-by-a-client: "
    NAMED, NAMELESS = "claude-code-cch-2.1.119", "pi-messages-0.73.1"

    def changes(self) -> dict[str, Change]:
        rng = random.Random(5)

        def lined(_turn: int, body: dict[str, Any]) -> None:
            line = {"type": "text", "text": f"{self.LINE}{rng.random()}"}
            body["system"] = [line, *body["system"]]
            del body["tools"]  # which stand before the system text

        return dict.fromkeys(USERS[:4], lined)

    async def found(self, tmp_path: Path, client: str = NAMED) -> tuple[list[Served], list[Served]]:
        """Those of the form, and others beside them."""
        session = sessions_of(client)[0]
        async with proxied(tmp_path, 3, sim=ENGINE) as (proxy, _):
            found = await served(proxy, session, USERS, self.changes())
            await proxy.at_rest()
        mine = [one for one in found if one.user in USERS[:4]]
        return mine, [one for one in found if one.user not in USERS[:4]]

    @pytest.mark.parametrize("client", [NAMED, NAMELESS])
    async def test_a_line_that_the_engine_drops(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str
    ) -> None:
        dropped = (self.LINE, messages._NOT_FOR_THE_MODEL)
        monkeypatch.setattr(messages, "_NOT_FOR_THE_MODEL", dropped)
        mine, others = await self.found(tmp_path, client)
        assert largest(mine, range(3, 99)) < 0.05
        places = defaultdict(set)
        for one in mine:
            if one.turn >= 3:
                places[one.user].add(one.record["decode_instance"])
        assert {len(found) for found in places.values()} == {1}
        assert all(is_near(one) for one in others if one.turn >= 2)

    async def test_a_line_that_the_engine_renders(self, tmp_path: Path) -> None:
        mine, others = await self.found(tmp_path)
        late = [one.record for one in mine if one.turn >= 3]
        assert max(r["cached_tokens"] for r in late) < 16
        assert max(r["hit_tokens"] / r["prompt_tokens"] for r in late) < 0.02
        assert all(is_near(one) for one in others if one.turn >= 2)
