"""The plugin vllm-thermal in a real engine: fewer run, and what they say is the same."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.real_vllm.engines.adapter import made_adapter
from tests.real_vllm.engines.fleet import MODEL, Engine, Site, running
from tests.real_vllm.rig import COMPLETIONS, Pair, ask, ids, token_ids
from vllm_thermal.control import VICTIMS

TOKEN = "not-known-to-any-client"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
REQUESTS, CAP = 8, 2
OUTPUT_TOKENS = 800
"""Enough to be running still when eight have begun and two go on alone."""
POLICY_TOKENS = 3000
"""Enough to be running while a policy reads three temperatures."""
WAIT_S = 120.0
ATTEMPTS = 5
STEPS = 2
"""Engine steps in which what runs has to fall to the cap."""
ADAPTERS = ("adapter-0", "adapter-1")
PROMPTS = [ids(200 + 40 * i, f"thermal-{i}") for i in range(REQUESTS)]
NO_LIMIT: dict[str, Any] = {"cap": None, "max_tokens_per_step": None, "preempt": True}
FLAGS = (
    *("--scheduler-cls", "vllm_thermal.scheduler.ThermalScheduler"),
    *("--long-prefill-token-threshold", "32"),
)
"""A step gives no prompt more than 32 tokens while others are there: many are half computed."""


class Capped(Pair):
    """An engine with the plugin."""

    @property
    def engine(self) -> Engine:
        return self.engines[0]

    async def put(self, **fields: Any) -> dict[str, Any]:
        """Set limits; what the engine tells then."""
        url = f"{self.engine.url}/plugins/thermal"
        async with self.http.put(url, json=fields, headers=AUTH) as response:
            assert response.status == 200, await response.text()
            found: list[dict[str, Any]] = await response.json()
        (status,) = found
        return status

    async def status(self) -> dict[str, Any]:
        async with self.http.get(f"{self.engine.url}/plugins/thermal", headers=AUTH) as response:
            assert response.status == 200, await response.text()
            found: list[dict[str, Any]] = await response.json()
        (status,) = found
        return status

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the engine tells something; what it tells."""
        async with asyncio.timeout(WAIT_S):
            while not condition(found := await self.status()):
                await asyncio.sleep(0.005)
        return found

    async def runs(self, count: int) -> dict[str, Any]:
        """Wait until so many run."""
        return await self.until(lambda status: status["running"] == count)

    async def at_limit(self) -> dict[str, Any]:
        """Wait until no more run than may."""
        return await self.until(lambda status: status["steps_to_limit"] is not None)

    async def run_at_once(self, count: int, work: asyncio.Task[Any]) -> bool:
        """Wait until so many run; False where their work is done before that was seen."""
        status = await self.until(lambda s: s["running"] == count or work.done())
        return bool(status["running"] == count)

    async def steps(self, count: int) -> dict[str, Any]:
        """Wait for so many steps of the engine."""
        last = (await self.status())["steps"] + count
        return await self.until(lambda status: status["steps"] >= last)

    async def outputs(self, salt: str, models: Sequence[str] = (MODEL,)) -> list[list[int]]:
        """What the models in turns say to the prompts, asked at once."""
        asked = [
            self.generate(
                prompt,
                salt,
                model=models[i % len(models)],
                max_tokens=OUTPUT_TOKENS,
                priority=i % 3,
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        return list(await asyncio.gather(*asked))

    async def check_outputs(
        self, got: list[list[int]], want: list[list[int]], models: Sequence[str] = (MODEL,)
    ) -> None:
        """What the models said twice to the prompts is the same."""
        for i, (prompt, one, other) in enumerate(zip(PROMPTS[: len(want)], got, want, strict=True)):
            await self.check_same(self.engine, prompt, one, other, models[i % len(models)])

    async def generate(self, prompt: list[int], salt: str, **more: Any) -> list[int]:
        """Greedy output; the salt keeps it apart from the cache of others."""
        body = ask(COMPLETIONS, prompt, stream=False, cache_salt=salt, **more)
        return token_ids(await self.post(self.engine, COMPLETIONS, body))


class Hot:
    """An engine whose policy reads temperatures that a test writes, as a sidecar does."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._folder = folder
        self.heat(60.0)
        env = {
            "VLLM_THERMAL_OPEN": "1",
            "VLLM_THERMAL_POLICY": "proportional",
            "VLLM_THERMAL_READINGS": f"file:{folder / 'celsius'}",
            "VLLM_THERMAL_K_P": "2",
        }
        flags = (*FLAGS, "--middleware", "vllm_thermal.plugin.ThermalMiddleware")
        self.engine = Engine(site, "thermal-policy", "none", flags, env)

    def heat(self, celsius: float) -> None:
        """GPU 0 stays cool, GPU 1 has so many degrees."""
        (self._folder / "next").write_text(f"0 50\n1 {celsius}\n")
        os.replace(self._folder / "next", self._folder / "celsius")


@pytest.fixture(scope="module")
def engines(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Hot]]:
    """One that is told its cap and serves an adapter beside the model, one with a policy."""
    folder = tmp_path_factory.mktemp("thermal")
    (folder / "token").write_text(TOKEN)
    env = {"VLLM_PLUGINS": "thermal", "VLLM_THERMAL_TOKEN": f"@{folder / 'token'}"}
    adapters = [f"{name}={made_adapter(folder / name, i)}" for i, name in enumerate(ADAPTERS)]
    flags = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    flags += ["--lora-modules", *adapters]
    told, hot = Engine(site, "thermal", "none", (*FLAGS, *flags), env), Hot(site, folder)
    with running([told, hot.engine]):
        yield told, hot


@pytest.fixture
async def capped(engines: tuple[Engine, Hot]) -> AsyncIterator[Capped]:
    async with aiohttp.ClientSession() as http:
        rig = Capped(http, [engines[0]])
        await rig.put(**NO_LIMIT, victim="newest")
        yield rig
        await rig.put(**NO_LIMIT)
        await rig.at_rest()
        assert (await rig.status())["kv_usage"] == 0.0


@pytest.fixture(scope="module")
def uncapped() -> list[list[int]]:
    """Each prompt's output without a cap, once it was asked for."""
    return []


async def cut(capped: Capped, victim: str, models: Sequence[str] = (MODEL,)) -> list[list[int]]:
    """Outputs of requests of which all but `CAP` gave way for a while.

    On a machine that is too busy the requests may be over before that is seen: it is tried again.
    """
    for attempt in range(ATTEMPTS):
        before = (await capped.status())["preempted"]
        async with asyncio.TaskGroup() as group:
            found = group.create_task(capped.outputs(f"{victim} {models} {attempt}", models))
            if not await capped.run_at_once(REQUESTS, found):
                continue
            status = await capped.put(cap=CAP, victim=victim)
            assert status["limit"] == CAP
            is_cut = status["running"] == REQUESTS
            status = await capped.at_limit()
            assert status["steps_to_limit"] <= STEPS
            assert (await capped.steps(20))["running"] <= CAP
            await capped.put(cap=None)
        if is_cut:
            assert (await capped.status())["preempted"] - before == REQUESTS - CAP
            return found.result()
    raise AssertionError("the machine is too busy")


@pytest.mark.parametrize("victim", sorted(VICTIMS))
async def test_outputs_are_those_of_the_uncapped_run(
    capped: Capped, uncapped: list[list[int]], victim: str
) -> None:
    if not uncapped:
        uncapped += await capped.outputs("uncapped")
    await capped.check_outputs(await cut(capped, victim), uncapped)


async def test_outputs_of_adapters_are_those_of_the_uncapped_run(capped: Capped) -> None:
    """Adapters only: where the base model runs beside them, vLLM's CPU kernels apply them to it."""
    want = await capped.outputs("adapters", ADAPTERS)
    other = await capped.generate(PROMPTS[1], "other", model=ADAPTERS[0], max_tokens=8)
    assert other != want[1][:8]
    await capped.check_outputs(await cut(capped, "largest_kv", ADAPTERS), want, ADAPTERS)


async def test_without_preemption_none_gives_way(capped: Capped, uncapped: list[list[int]]) -> None:
    if not uncapped:
        uncapped += await capped.outputs("uncapped")
    before = (await capped.status())["preempted"]
    async with asyncio.TaskGroup() as group:
        await capped.put(cap=4)
        found = group.create_task(capped.outputs("drain"))
        await capped.until(lambda status: status["running"] + status["waiting"] == REQUESTS)
        status = await capped.put(cap=1, preempt=False)
        assert status["running"] == 4
        assert status["steps_to_limit"] is None
        status = await capped.at_limit()
        assert status["steps_to_limit"] > STEPS
        assert status["running"] <= 1
        await capped.put(cap=None)
    await capped.check_outputs(found.result(), uncapped)
    assert (await capped.status())["preempted"] == before


async def test_evicted_in_mid_prefill_under_load(capped: Capped) -> None:
    """Long prompts in pieces beside streams that decode, sent away again and again."""
    prompts = [ids(14000 + 500 * i, f"long-{i}") for i in range(6)]
    short = [ids(64, f"short-{i}") for i in range(4)]

    async def all_of(salt: str) -> list[list[int]]:
        long = [capped.generate(p, salt, max_tokens=16) for p in prompts]
        streams = [capped.generate(p, salt, max_tokens=1200) for p in short]
        return list(await asyncio.gather(*long, *streams))

    want = await all_of("whole")
    for attempt in range(ATTEMPTS):
        before, times = (await capped.status())["preempted"], 0
        async with asyncio.TaskGroup() as group:
            found = group.create_task(all_of(f"cut {attempt}"))
            for victim in sorted(VICTIMS):
                if not await capped.run_at_once(10, found):
                    break
                status = await capped.put(cap=CAP, victim=victim)
                times += status["running"] == 10  # no prompt is through yet
                assert (await capped.at_limit())["steps_to_limit"] <= STEPS
                await capped.put(cap=None)
        for prompt, one, other in zip([*prompts, *short], found.result(), want, strict=True):
            await capped.check_same(capped.engine, prompt, one, other)
        if times == len(VICTIMS):
            assert (await capped.status())["preempted"] - before == 8 * times
            return
    raise AssertionError("the machine is too busy")


async def test_a_step_has_no_more_tokens_than_were_asked_for(capped: Capped) -> None:
    prompt = ids(8000, "budget")
    want = await capped.generate(prompt, "full")
    steps = (await capped.status())["steps"]
    status = await capped.put(max_tokens_per_step=256)
    assert status["max_tokens_per_step"] == 256
    await capped.check_same(capped.engine, prompt, await capped.generate(prompt, "little"), want)
    assert (await capped.status())["steps"] - steps >= 8000 // (256 + 64)


def test_outputs_are_the_same_with_two_steps_under_way(site: Site) -> None:
    """As on a GPU; with a KV connector, whose blocks must not be given away before a step ends."""
    script = Path(__file__).parent / "engines" / "overlap.py"
    command = [str(site.venv / "bin" / "python"), str(script), str(site.model)]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, check=False, timeout=300.0
    )
    assert run.returncode == 0, run.stderr[-3000:]
    told = [orjson.loads(x[6:]) for x in run.stdout.splitlines() if x.startswith("told: ")]
    assert len({case["case"] for case in told}) == 2 * len(VICTIMS)
    for case in told:
        assert case["same"], case
        assert case["slowest_steps"] <= STEPS, case
        assert case["preempted"] > REQUESTS, case
        assert case["skipped"] == 0, case


async def test_what_is_refused(capped: Capped) -> None:
    url = f"{capped.engine.url}/plugins/thermal"
    for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}):
        for method in ("GET", "PUT"):
            async with capped.http.request(
                method, url, json={"cap": 1}, headers=headers
            ) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
    async with capped.http.put(url, json={"victim": "oldest"}, headers=AUTH) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["message"].startswith("victim is 'oldest': it must be one of newest, ")
    async with capped.http.put(url, data=b"{", headers=AUTH) as response:
        assert response.status == 400
    async with capped.http.post(url, json={"cap": 1}, headers=AUTH) as response:
        assert response.status == 405
    assert (await capped.status())["limit"] == 16


async def test_limits_end_by_themselves(capped: Capped) -> None:
    await capped.put(cap=1, ttl_s=0.2)
    async with asyncio.TaskGroup() as group:
        for prompt in PROMPTS[:3]:
            group.create_task(capped.generate(prompt, "ttl", max_tokens=OUTPUT_TOKENS))
        await capped.until(lambda status: status["limit"] == 16)
    status = await capped.status()
    assert (status["cap"], status["ttl_s"], status["limit"]) == (None, None, 16)


async def test_a_policy_in_the_engine_caps_it_by_temperature(engines: tuple[Engine, Hot]) -> None:
    """Alone, as the founding document has it: readings of a sidecar, the policy by its name.

    On the path that vLLM before 0.26 takes: a middleware.
    """
    hot = engines[1]

    async def reads(celsius: float) -> dict[str, Any]:
        """Have the engine read a temperature and make a step."""
        hot.heat(celsius)
        await rig.until(lambda status: status["policy"]["celsius"]["1"] == celsius)
        return await rig.steps(1)

    async with aiohttp.ClientSession() as http:
        rig = Capped(http, [hot.engine])
        want = await asyncio.gather(
            *(rig.generate(p, "cool", max_tokens=POLICY_TOKENS) for p in PROMPTS[:4])
        )
        async with asyncio.TaskGroup() as group:
            found = [
                group.create_task(rig.generate(p, "hot", max_tokens=POLICY_TOKENS))
                for p in PROMPTS[:4]
            ]
            await rig.runs(4)
            status = await reads(89.0)
            assert (status["limit"], status["policy"]["cap"]) == (CAP, CAP)
            assert status["policy"]["celsius"]["0"] == 50.0
            assert (await rig.at_limit())["steps_to_limit"] <= STEPS
            assert (await rig.status())["running"] == CAP
            assert (await reads(80.0))["limit"] == CAP
            assert (await reads(78.0))["limit"] == 16
            await rig.until(lambda status: status["running"] > CAP)
        await rig.check_outputs([task.result() for task in found], want)
        assert (await rig.status())["preempted"] == 2
        await rig.at_rest()
