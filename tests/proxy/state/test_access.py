"""Keys, tenants and what of them gets where."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.config.options import Settings
from proxy.config.secrets import fingerprint
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Instance, RouterConfig
from proxy.protocol.endpoints import ENDPOINTS
from proxy.protocol.prompt.facts import TokenEstimator
from proxy.state.access import Access, salt_of
from tests.support.examined import facts_of
from tests.support.harness import RawEngine, ServedProxy, chat, plain, proxied, says, words
from tests.support.tenants import SECRET

KEYS = "acme:sk-acme-0123456789abcdef,zeta:sk-zeta-0123456789abcdef,sk-nameless-0123456789"


ACME = {"Authorization": "Bearer sk-acme-0123456789abcdef"}


ZETA = {"Authorization": "Bearer sk-zeta-0123456789abcdef"}


WRONG: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": "Bearer sk-acme-0123456789abcde"},
    {"Authorization": "Bearer sk-acme-0123456789abcdefg"},
    {"Authorization": "sk-acme-0123456789abcdef"},
    {"Authorization": "Basic sk-acme-0123456789abcdef"},
    {"Authorization": "Bearer acme:sk-acme-0123456789abcdef"},
    {"Authorization": "Bearer sk-acme-0123456789abcdef,sk-zeta-0123456789abcdef"},
    {"x-api-key": "nobody"},
    {"Authorization": "Basic x", "x-api-key": "sk-acme-0123456789abcdef"},
]


async def test_only_a_known_key_gets_in_and_probes_stay_open(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, api_key=KEYS) as (proxy, _):
        for headers in WRONG:
            answer = await proxy.post(chat("x"), headers=headers)
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            error = answer.json["error"]
            assert (error["type"], error["code"]) == ("authentication_error", 401)
        async with proxy.http.get("/v1/models") as response:
            assert response.status == 401
        async with proxy.http.get("/v1/models", headers=ACME) as response:
            assert response.status == 200
        assert (await proxy.post({"prompt": "x"}, "/tokenize")).status == 401
        for path in ("/live", "/ready", "/health", "/metrics"):
            async with proxy.http.get(path) as response:
                assert response.status == 200
        for good in (
            ACME,
            {"authorization": "bearer sk-nameless-0123456789"},
            {"x-api-key": "sk-zeta-0123456789abcdef"},
        ):
            assert (await proxy.post(chat("x"), headers=good)).status == 200
        assert proxy.metric("denied_total", who="client") == len(WRONG) + 2
        records = await proxy.records(len(WRONG) + 4)
        tenants = [r["tenant"] for r in records if r["outcome"] == "ok"]
        assert tenants == ["acme", fingerprint("sk-nameless-0123456789"), "zeta"]
        assert {r["outcome"] for r in records if r["status"] == 401} == {"bad_request"}
        assert not any(k.partition(":")[2] in str(records) for k in KEYS.split(",")[:2])
        await proxy.at_rest()


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, b"Bearer sk-acme-0123456789abcdef"),
        ({"api_key": KEYS}, None),
        ({"api_key": KEYS, "instance_api_key": "inner"}, b"Bearer inner"),
        ({"instance_api_key": "inner"}, b"Bearer inner"),
    ],
)
async def test_which_key_an_instance_sees(
    tmp_path: Path, options: dict[str, str], seen: bytes | None
) -> None:
    async with RawEngine() as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            await proxy.up()
            assert (await proxy.post(chat("x"), headers=ACME | {"X-Other": "y"})).status == 200
        (post,) = engine.post_heads
        found = re.findall(rb"(?mi)^authorization: (.*)\r$", post)
        assert found == ([] if seen is None else [seen])
        assert b"X-Other: y" in post
        probes = [h for h in engine.heads if h.startswith(b"GET /v1/models")]
        assert all((b"Bearer inner" in h) == ("instance_api_key" in options) for h in probes)


async def test_every_body_of_a_tenant_carries_its_salt(tmp_path: Path) -> None:
    """Whatever the client says of it; routing headers would tell of others' prompts."""
    options = {"api_key": KEYS, "cache_salt_secret": SECRET, "salted_paths": "/v1/embeddings"}
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            await proxy.up()
            spellings = (
                b'{"model":"sim-8b","messages":[]}',
                b'{"cache_salt":"mine","model":"sim-8b","messages":[]}',
                b'{"cache_salt":null,"messages":[],"cache_salt":"twice"}',
                b'{"\\u0063ache_salt":"escaped","messages":[ ]}',
                b'{"messages":[{"cache_salt":"nested, kept"}],"cache_salt":{"a":[1]}}',
                b'{"cache_salt":"' + b"a/b@" * 2560 + b'","kv_transfer_params":{"x":1}}',
                b"{}",
            )
            paths = ("/v1/chat/completions", "/v1/embeddings", "/tokenize", "/v1/responses")
            for path in paths:
                for body in spellings:
                    for who, tenant in ((ACME, "acme"), (ZETA, "zeta")):
                        answer = await proxy.post(body, path, headers=who)
                        assert answer.status == 200
                        assert not [h for h in answer.headers if h.startswith("X-Cache-Proxy")]
                        sent = engine.posts[-1]
                        want = salt_of(SECRET.encode(), tenant)
                        assert len(want) == 43
                        assert orjson.loads(sent)["cache_salt"] == want
                        assert sent.count(b"cache_salt") == 1 + (b"nested" in body)
                        assert b"kv_transfer_params" not in sent
            assert (await proxy.post(b"[1]", "/v1/embeddings", headers=ACME)).status == 400


FORM = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\naudio\r\n--x--\r\n'
IS_FORM = {"Content-Type": "multipart/form-data; boundary=x"}
MESSAGE = b'{"model":"sim-8b","max_tokens":2,"messages":[{"role":"user","content":"x"}]}'


@pytest.mark.parametrize(
    ("path", "body", "headers", "allowed", "status"),
    [
        ("/v1/messages", MESSAGE, {}, "", 403),
        ("/v1/messages?beta=true", MESSAGE, {}, "", 403),
        ("/v1/messages", MESSAGE, {}, "/v1/messages", 200),
        ("/v1/messages?beta=true", MESSAGE, {}, "/v1/messages", 200),
        ("/v1/messages/count_tokens", MESSAGE, {}, "", 200),
        ("/v1/embeddings", b'{"input":"x"}', {}, "/v1/messages", 403),
        ("/v1/chat/completions/batch", b"{}", {}, "", 403),
        ("/v1/audio/transcriptions", FORM, IS_FORM, "", 403),
        ("/v1/audio/transcriptions", FORM, IS_FORM, "/v1/audio/transcriptions", 400),
        ("/v1/responses", FORM, IS_FORM, "", 400),
        ("/v1/responses", b"{", IS_FORM, "", 400),
        ("/v1/responses", b"{ }", {}, "", 200),
        ("/tokenize", FORM, IS_FORM, "", 200),
        ("/v1/unknown_to_us", b"", {}, "", 200),
    ],
)
async def test_what_cannot_be_salted_is_refused(
    tmp_path: Path, path: str, body: bytes, headers: dict[str, str], allowed: str, status: int
) -> None:
    """An engine that ignores the field would share KV between tenants, and nobody would see it."""
    options = {"api_key": KEYS, "cache_salt_secret": SECRET, "salted_paths": allowed}
    options |= {"extra_paths": "/v1/unknown_to_us"}
    async with RawEngine(says(plain(b"{}"))) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            await proxy.up()
            given = {"Content-Type": "application/json"} | headers | ACME
            answer = await proxy.post(body, path, headers=given)
            assert answer.status == status, answer.body
            assert len(engine.posts) == (status == 200)
            said = answer.json["error"]["message"] if status != 200 else ""
            if status == 200:
                salted = path not in ("/tokenize", "/v1/unknown_to_us")
                assert (b"cache_salt" in engine.posts[-1]) == salted
            else:
                assert "--cache-salt-secret" in said
                assert len(said.splitlines()) == 1
            if status == 403:
                assert "--salted-paths" in said
                shown = path.partition("?")[0]
                assert (shown in said) == (shown in ENDPOINTS)


@pytest.mark.parametrize("salt", ["a/b@", "x" * 129, "", "a\\b", "a\0b", 7, {}, ["a"]])
async def test_a_clients_own_salt_has_to_be_one(tmp_path: Path, salt: Any) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        answer = await proxy.post(chat("x", cache_salt=salt))
        assert (answer.status, answer.json["error"]["param"]) == (400, "cache_salt")
        assert (await proxy.post(chat("x", cache_salt="fine-" + "x" * 100))).status == 200


async def test_a_session_is_its_tenants(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2, api_key=KEYS) as (proxy, _):
        for who in (ACME, ZETA):
            assert (await proxy.post(chat("x"), headers=who | {"X-Session-ID": "s"})).status == 200
        assert len(proxy.router.known.sessions) == 2
        async with proxy.http.post("/sessions/s/end") as response:
            assert response.status == 404
        async with proxy.http.post("/sessions/s/end?tenant=acme") as response:
            assert response.status == 200
        assert len(proxy.router.known.sessions) == 1


async def test_headers_that_steer_an_engine_stay_here(tmp_path: Path) -> None:
    async with RawEngine() as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            await proxy.up()
            steering = {"X-data-parallel-rank": "5", "x-prefiller-host-port": "10.0.0.9:1"}
            assert (await proxy.post(chat("x"), headers=steering)).status == 200
        (post,) = engine.post_heads
        assert not re.search(rb"(?i)rank|prefiller", post)


def test_no_tenants_prompt_moves_anothers() -> None:
    """10,000 requests for prompts that another tenant has been served: no hit, no home."""
    settings = Settings(instances="a:1", api_key="t0:k0,t1:k1", cache_salt_secret=SECRET)
    access = Access(settings)
    keys = [CIMultiDict(Authorization=f"Bearer k{at}") for at in range(2)]
    salts = [access.grant(CIMultiDictProxy(headers)).salt for headers in keys]
    router = Router(FleetState(RouterConfig(prefill_throughput=20000)))
    for name in "abcd":
        router.known.add(Instance(name, f"http://{name}:1"))
    estimator, rng = TokenEstimator(), random.Random(5)
    prompts = [words(200, f"p{i}-") for i in range(50)]

    def facts(tenant: int, prompt: str, session: str) -> Any:
        body = chat(prompt) | {"cache_salt": salts[tenant]}
        headers = {"X-Session-ID": session}
        path = "/v1/chat/completions"
        return facts_of(path, body, headers, f"t{tenant}", estimator)

    for at, prompt in enumerate(prompts):
        seen = facts(0, prompt, f"s{at}")
        route = router.admit(seen, 0.0)
        assert isinstance(route, Route)
        router.first_token(route, seen, 0.1)
        router.completed(route, seen)
        router.finish(route, 0.2)
        assert max(router.known.reuse.hits(facts(0, prompt, "x")).values()) > 0
    others = [facts(1, prompt, f"s{at}") for at, prompt in enumerate(prompts)]
    for _ in range(10_000):
        other = rng.choice(others)
        assert not any(router.known.reuse.hits(other).values())
        assert router.known.sessions.home(other.session_id, 0.3) is None


async def test_both_legs_of_an_offload_carry_the_salt(tmp_path: Path) -> None:
    options: dict[str, Any] = {"api_key": KEYS, "cache_salt_secret": SECRET}
    options |= {"offload_policy": "always", "heavy_threshold": 500, "warm_threshold": 100}
    options["hedge"] = False  # on a busy machine P is late, and a third engine's leg runs
    prompt = words(1000)
    async with proxied(tmp_path, 2, **options) as (proxy, fleet):
        for who in (ACME, ZETA, ACME):
            assert (await proxy.post(chat(prompt), headers=who)).status == 200
        first, other, again = await proxy.records(3)
        assert (first["route_class"], other["route_class"]) == ("HEAVY_P2P", "HEAVY_P2P")
        assert (first["hit_tokens"], other["hit_tokens"]) == (0, 0)
        assert again["hit_tokens"] > 0
        hits = {r["request_id"]: r["local_hit_tokens"] for r in fleet.records}
        (own,) = [one for one in hits if one.startswith(again["request_id"])]
        assert hits.pop(own) > 0
        assert list(hits.values()) == [0, 0, 0, 0], "both engines hold the other tenant's prompt"
        await proxy.at_rest()
