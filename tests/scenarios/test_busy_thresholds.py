"""Busy thresholds as a client and an operator see them, in front of scripted engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.config.load import load
from proxy.core.accounts.lease import Phase
from tests.support.admin import call
from tests.support.harness import RawEngine, ServedProxy, chat, plain, proxied, until, words


@asynccontextmanager
async def served(folder: Path, *engines: RawEngine, **options: Any) -> AsyncIterator[ServedProxy]:
    """A proxy without a queue in front of these engines, under the names e0, e1, ..."""
    addresses = [f"e{at}={engine.address}" for at, engine in enumerate(engines)]
    options = {"max_queue": 0, "scrape_interval": 0.02, "health_interval": 0.02} | options
    async with ServedProxy(folder / "log.jsonl", addresses, **options) as proxy:
        await proxy.up()
        yield proxy


def report(*used_by_rank: float, tokens: int = 100_000) -> bytes:
    """An engine's /metrics: the KV usage of each data-parallel rank and the size of its cache."""
    text = "".join(
        f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {used}\n'
        f'vllm:cache_config_info{{engine="{rank}",kv_cache_size_tokens="{tokens}"}} 1\n'
        for rank, used in enumerate(used_by_rank)
    )
    return plain(text.encode())


async def test_an_instance_is_busy_only_while_all_its_ranks_are(tmp_path: Path) -> None:
    async with RawEngine() as engine:
        engine.gets["/metrics"] = report(0.95, 0.2)
        async with served(tmp_path, engine, active_decode_blocks_threshold=0.85) as proxy:

            async def status_at(*used_by_rank: float) -> int:
                """The status of a request once the engine has reported this."""
                engine.gets["/metrics"] = report(*used_by_rank)

                async def is_read() -> bool:
                    (instance,) = (await call(proxy, "GET", "/instances"))[1]
                    stats = instance["engine"]
                    return stats is not None and stats["kv_used_by_rank"] == [*used_by_rank]

                await until(is_read, "the report is read")
                return (await proxy.post(chat("x", stream=False))).status

            assert await status_at(0.95, 0.2) == 200
            assert await status_at(0.95, 0.86) == 503
            assert await status_at(0.2, 0.95) == 200
            assert proxy.metric("kv_cache_usage_ratio", upstream="e0") == 0.95, "the fullest rank"


async def test_a_request_says_which_role_a_threshold_stood_against(tmp_path: Path) -> None:
    """Two engines that hand KV over; what is charged to them puts them past a threshold."""
    limits = {"active_decode_blocks_threshold": 0.5, "active_prefill_tokens_threshold": 5000}
    options: dict[str, Any] = limits | {"heavy_threshold": 100, "warm_threshold": 50}
    async with proxied(
        tmp_path, 2, offload_policy="always", max_queue=0, scrape_interval=0.02, **options
    ) as (proxy, _):
        first, second = (spec.name for spec in proxy.settings.instances)
        router = proxy.router
        await until(
            lambda: router.known.gate.kv_tokens(first) and router.known.gate.kv_tokens(second),
            "sizes",
        )
        over = {Phase.PREFILL: 5001, Phase.DECODE: router.known.gate.kv_tokens(first) // 2 + 1}

        async def asked(**past: Phase) -> tuple[str | None, ...]:
            """D, class and reason of a HEAVY request while these instances are past a threshold."""
            names = {"first": first, "second": second}
            leases = [
                router.known.ledger.open(
                    router.known.ledger.charge(names[which], phase, over[phase])
                )
                for which, phase in past.items()
            ]
            answer = await proxy.post(chat(words(300, seed=f"s{len(past)}{past}"), max_tokens=2))
            for lease in leases:
                lease.close()
            assert answer.status == 200
            head = answer.headers
            said = [head.get(f"X-Cache-Proxy-{name}") for name in ("Instance", "Route")]
            return (*said, head["X-Cache-Proxy-Reason"].rpartition("; ")[2])

        past = asked(second=Phase.PREFILL)
        assert await past == (first, "HEAVY_COLO", "peer_past_threshold")
        past = asked(first=Phase.PREFILL, second=Phase.DECODE)
        assert await past == (first, "HEAVY_P2P", "split_roles")
        await proxy.at_rest()


SOURCES = ("own", "reported")
DECODE, TOKENS = "active_decode_blocks_threshold", "active_prefill_tokens_threshold"
CARDS = [
    {"id": "Base-8B", "root": "org/base", "parent": None},
    {"id": "tuned", "root": "/adapters/tuned", "parent": "Base-8B"},
    {"id": "other", "root": "org/other", "parent": None},
]


async def test_a_model_follows_all_and_an_adapter_its_base(tmp_path: Path) -> None:
    """One engine whose KV is used to 60 % serves a base model, its adapter and another model."""
    async with RawEngine() as engine:
        engine.gets["/metrics"] = report(0.6)
        engine.gets["/v1/models"] = plain(orjson.dumps({"object": "list", "data": CARDS}))
        async with served(tmp_path, engine, model="Base-8B") as proxy:

            async def learned() -> bool:
                (instance,) = (await call(proxy, "GET", "/instances"))[1]
                return instance["engine"] is not None and len(instance["models"]) == 3

            await until(learned, "models and report are read")

            async def put(model: str, **limits: Any) -> tuple[Any, ...]:
                body = {"model": model} | limits
                status, row = await call(proxy, "POST", "/busy_threshold", body)
                return status, row["model"], row[DECODE], row[TOKENS]

            async def statuses() -> dict[str, int]:
                asked = ("Base-8B", "tuned", "other")
                bodies = {m: chat("x", stream=False, model=m) for m in asked}
                return {m: (await proxy.post(body)).status for m, body in bodies.items()}

            def busy(model: str) -> float:
                labels = {"upstream": "e0", "check": "decode_blocks", "model": model}
                return proxy.metric("instance_busy", **labels)

            assert await put("*", **{DECODE: 0.9}) == (200, "*", 0.9, None)
            assert await put("BASE-8b", **{TOKENS: 5000}) == (200, "Base-8B", 0.9, 5000)
            assert await put("*", **{DECODE: 0.7}) == (200, "*", 0.7, None)
            assert await put("base-8b") == (200, "Base-8B", 0.7, 5000), "a later change of *"
            assert await put("TUNED") == (200, "tuned", 0.7, 5000), "as its base"
            assert await statuses() == {"Base-8B": 200, "tuned": 200, "other": 200}
            assert await put("Base-8B", **{DECODE: 0.5}) == (200, "Base-8B", 0.5, 5000)
            assert await statuses() == {"Base-8B": 503, "tuned": 503, "other": 200}

            (instance,) = (await call(proxy, "GET", "/instances"))[1]
            assert instance["busy"] == "decode_blocks"
            assert instance["busy_by_model"] == {"*": None, "Base-8B": "decode_blocks"}
            assert (busy("*"), busy("Base-8B")) == (0, 1)
            for model, check, limit in (
                ("*", "decode_blocks", 0.7),
                ("Base-8B", "decode_blocks", 0.5),
                ("Base-8B", "prefill_tokens", 5000),
            ):
                assert proxy.metric("busy_threshold", model=model, check=check) == limit

            before = await call(proxy, "GET", "/busy_threshold")
            for query in ("?model=never-seen", f"?model=never-seen&field={DECODE}"):
                status, said = await call(proxy, "DELETE", f"/busy_threshold{query}")
                assert (status, said) == (404, {"error": "Model 'never-seen' not found."})
            assert await call(proxy, "GET", "/busy_threshold") == before, "nothing was created"
            one = f"/busy_threshold?model=BASE-8B&field={DECODE}"
            status, row = await call(proxy, "DELETE", one)
            assert (status, row[DECODE], row[TOKENS]) == (200, 0.7, 5000)
            assert (await call(proxy, "DELETE", "/busy_threshold?model=tuned"))[0] == 200


async def test_a_threshold_without_effect_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with RawEngine() as engine:
        async with served(tmp_path, engine, active_decode_blocks_threshold=0.85) as proxy:

            def said(words: str) -> int:
                return sum(words in record.getMessage() for record in caplog.records)

            async def warnings() -> str:
                return str((await call(proxy, "GET", "/health"))[1]["instances"]["e0"]["warnings"])

            none = f"instance e0: {DECODE} has no effect: its /metrics tell no KV cache size"
            await until(lambda: said(none), "logged")
            assert f"{DECODE} has no effect" in await warnings()
            assert proxy.metric("threshold_without_effect", upstream="e0") == 1
            body = {"model": "*", DECODE: 0.7}
            assert (await call(proxy, "POST", "/busy_threshold", body))[1]["without_effect_on"] == [
                "e0"
            ]
            engine.gets["/metrics"] = report(0.25)
            await until(lambda: said("instance e0: KV threshold: in order again"), "logged")
            assert DECODE not in await warnings()
            assert proxy.metric("threshold_without_effect", upstream="e0") == 0
            assert said(none) == 1, "once, not at every report"


async def test_what_thresholds_are_compared_with_is_there_before_any_is_set(
    tmp_path: Path,
) -> None:
    async with RawEngine() as engine:
        engine.gets["/metrics"] = report(0.75, 0.25, tokens=50_000)
        async with served(tmp_path, engine) as proxy:
            await until(lambda: proxy.metric("engine_ranks", upstream="e0") == 2, "read")
            charges = proxy.router.known.ledger.charge("e0", Phase.DECODE, 40_000)
            lease = proxy.router.known.ledger.open(charges)
            ratio = {s: proxy.metric("kv_blocks_ratio", upstream="e0", source=s) for s in SOURCES}
            assert ratio == {"own": 0.4, "reported": 0.25}
            assert proxy.metric("kv_cache_size_tokens", upstream="e0") == 100_000
            async with proxy.http.get("/metrics") as response:
                lines = (await response.text()).splitlines()
            assert [line for line in lines if "kv_blocks" in line and not line.startswith("#")]
            assert not [line for line in lines if line.startswith("cache_proxy_busy_threshold{")]
            lease.close()


AT_ONCE = {
    "message": "Service temporarily unavailable: All workers are busy, please retry later",
    "type": "service_unavailable",
    "code": 503,
}
PRESETS = Path(__file__).parents[2] / "configs/presets"


PRESET_ROWS = [
    ("conservative", 0.70, 5000),
    ("start", 0.75, None),
    ("raised", 0.85, None),
    ("aggressive", 0.95, 20_000),
    ("off", None, None),
]


@pytest.fixture
def given(preset: str) -> dict[str, Any]:
    """The options of a command line that names a preset."""
    args = ["--config", str(PRESETS / f"{preset}.toml"), "--max-queue", "0", "--instances", "e0:1"]
    loaded = load(args, {})
    origins = loaded.origins.items()
    options = {name: getattr(loaded.settings, name) for name, o in origins if o != "default"}
    del options["instances"]
    return options


def test_every_preset_is_tried() -> None:
    assert {path.stem for path in PRESETS.iterdir()} == {name for name, _, _ in PRESET_ROWS}


@pytest.mark.parametrize(("preset", "decode", "tokens"), PRESET_ROWS)
async def test_presets_start_and_refuse_past_their_thresholds(
    tmp_path: Path, given: dict[str, Any], decode: float | None, tokens: int | None
) -> None:
    """Started as a user does, with --config, and --max-queue 0: refused at once."""
    async with RawEngine() as engine:
        async with served(tmp_path, engine, **given) as proxy:
            (row,) = (await call(proxy, "GET", "/busy_threshold"))[1]["thresholds"]
            assert (row["model"], row[DECODE], row[TOKENS]) == ("*", decode, tokens)

            async def status_at(used: float) -> int:
                engine.gets["/metrics"] = report(used)
                shown = {"upstream": "e0", "source": "reported"}
                await until(lambda: proxy.metric("kv_blocks_ratio", **shown) == used, "reported")
                answer = await proxy.post(chat("x", stream=False))
                if answer.status == 503:
                    said = {key: answer.json[key] for key in AT_ONCE}
                    assert said == AT_ONCE
                return answer.status

            limit = decode or 1.0
            assert await status_at(limit - 0.01) == 200
            assert await status_at(limit) == 200, "at the threshold is free"
            assert await status_at(min(1.0, limit + 0.01)) == (503 if decode else 200)
