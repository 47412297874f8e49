"""Hostile requests of every class before real engines: no engine and nobody else is harmed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.faults import hostile
from tests.real_vllm.engines.fleet import MODEL
from tests.real_vllm.rig import ALWAYS, CHAT, Pair, ask, token_ids, words

TIMES = 3
"""Requests of each class: more than the failures in a row that eject an instance would take."""


async def test_each_class_leaves_engines_and_others_as_they_were(
    tmp_path: Path,
    mooncake: Pair,
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str], None],
) -> None:
    monkeypatch.setattr(hostile, "SILENT_S", 0.5)
    monkeypatch.setattr(hostile, "HELD_S", 0.5)
    body = ask(CHAT, words(400, "beside"), stream=True)
    wanted = await mooncake.fresh(mooncake.engines[0], CHAT, body)
    async with mooncake.proxy(tmp_path, **ALWAYS) as proxy:
        await proxy.up()
        attack = hostile.Attack(proxy.server.url, random.Random(17), MODEL)
        for name in hostile.CLASSES:
            ends = Counter([await attack.one(name) for _ in range(TIMES)])
            figure(f"{name}: {', '.join(f'{end} x {count}' for end, count in ends.items())}")
            answer = await proxy.post(body, CHAT)
            assert (answer.status, token_ids(answer.body)) == (200, wanted), name
            members = proxy.router.known.fleet.members()
            assert [m.health.is_up for m in members] == [True, True], name
            assert [m.models for m in members] == [{MODEL}, {MODEL}], name
        await proxy.at_rest()
    await mooncake.at_rest()
