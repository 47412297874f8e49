"""Other options open nothing that was closed, and what they change about access is said."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import trustme

from proxy.config.load import load
from proxy.config.options import Settings
from proxy.config.secrets import SECRET_FILE_BYTES, SecretStr
from proxy.config.sources import ConfigError
from proxy.process import access_changes
from proxy.process.access_changes import Earlier, Fence, changes
from proxy.state.access import Access
from replayer.simulator.host import SimFleet
from tests.proxy.process.test_reload import from_file, rewrite, toml
from tests.support.harness import ServedProxy, addresses, chat
from tests.support.work import calls_of

KEY = "sk-acme-0123456789abcdef"
OTHER_KEY = "sk-zeta-fedcba9876543210"
CLOSED = {
    "admin_token": "a-token-of-operators",
    "api_key": f"acme:{KEY},zeta:{OTHER_KEY}",
    "cache_salt_secret": "0123456789abcdef",
    "instance_api_key": "an-engine-key-0123456789",
    "thermal_token": "a-thermal-token-01234",
}


async def status(proxy: ServedProxy, method: str, path: str, **asked: Any) -> int:
    async with proxy.http.request(method, path, **asked) as response:
        return response.status


@pytest.mark.parametrize("lines_left", range(len(CLOSED)))
async def test_a_file_that_was_cut_opens_nothing(
    tmp_path: Path, lines_left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A line that is missing would mean the default, which is open."""
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        instances, log = addresses(fleet), str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, instances, **CLOSED) as (proxy, path):
            kept = dict(list(CLOSED.items())[:lines_left])
            path.write_text(toml(instances, request_log=log, **kept))
            assert await proxy.server.reloader.reload("test") == "refused"
            assert await status(proxy, "POST", "/v1/chat/completions", json=chat("x")) == 401
            assert await status(proxy, "GET", "/instances") == 401
            assert await status(proxy, "DELETE", "/instances/x") == 401
            (line,) = [r.getMessage() for r in caplog.records if "not reloaded" in r.getMessage()]
            gone = [name for name in CLOSED if name not in kept]
            assert any(name in line for name in gone)
            assert not any(secret in caplog.text for secret in CLOSED.values())


CUT_KEYS = {
    "within a key": f"acme:{KEY}\nzeta:sk-zeta-fedcba98765432",
    "to a short rest": f"acme:{KEY}\nzeta:sk-z",
    "within a tenant's name": f"acme:{KEY}\nze",
    "within a long tenant's name": f"acme:{KEY}\nzeta:{OTHER_KEY}\nengineering-depart",
}


@pytest.mark.parametrize("how", CUT_KEYS)
async def test_the_rest_of_a_key_is_no_key(tmp_path: Path, how: str) -> None:
    keys = tmp_path / "keys"
    whole = f"acme:{KEY},zeta:{OTHER_KEY},engineering-department:sk-{'e' * 20}"
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        instances, log = addresses(fleet), str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, instances, api_key=whole) as (proxy, path):
            keys.write_text(CUT_KEYS[how])
            path.write_text(toml(instances, request_log=log, api_key=f"@{keys}"))
            rest = CUT_KEYS[how].splitlines()[-1].rpartition(":")[2]
            assert await proxy.server.reloader.reload("test") == "refused"
            for key, expected in ((rest, 401), (OTHER_KEY, 200), (KEY, 200)):
                head = {"Authorization": f"Bearer {key}"}
                asked = {"json": chat("x"), "headers": head}
                got = await status(proxy, "POST", "/v1/chat/completions", **asked)
                assert got == expected, how


@pytest.mark.parametrize("left", ["a-token-of-oper", "a-token-of-operator", "another"])
async def test_the_rest_of_a_token_is_no_token(tmp_path: Path, left: str) -> None:
    token = tmp_path / "token"
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        instances, log = addresses(fleet), str(tmp_path / "log.jsonl")
        given = {"admin_token": CLOSED["admin_token"]}
        async with from_file(tmp_path, instances, **given) as (proxy, path):
            token.write_text(left)
            path.write_text(toml(instances, request_log=log, admin_token=f"@{token}"))
            assert await proxy.server.reloader.reload("test") == "refused"
            head = {"Authorization": f"Bearer {left}"}
            assert await status(proxy, "GET", "/instances", headers=head) == 401


def test_a_keys_file_over_the_limit_is_not_cut_by_its_reader(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    line = f"t:{'k' * 30}"
    keys.write_text("".join(f"{line}{i:07}\n" for i in range(SECRET_FILE_BYTES // 38)))
    with pytest.raises(ConfigError, match=r"api_key.*larger than 1048576 bytes"):
        load(["--instances", "x:1", "--api-key", f"@{keys}"], {})


def test_certificates_of_clients_stay_needed(tmp_path: Path) -> None:
    made = trustme.CA().issue_cert("127.0.0.1")
    files = {name: str(tmp_path / f"{name}.pem") for name in ("tls_cert", "tls_client_ca")}
    made.private_key_and_cert_chain_pem.write_to_path(files["tls_cert"])
    made.cert_chain_pems[0].write_to_path(files["tls_client_ca"])
    given = {"instances": "a:1", "instance_ca": files["tls_cert"]} | files
    for name in ("tls_client_ca", "instance_ca"):
        with pytest.raises(ConfigError, match=f"{name} would become none"):
            Fence().refuse_opening(Settings(**given), Settings(**(given | {name: None})))


MOVES: dict[str, tuple[dict[str, Any], str]] = {
    "a page": ({"cors_allowed_origins": "https://a.example"}, "cors_allowed_origins https://a.exa"),
    "a path": ({"extra_paths": "/v1/images/*"}, "extra_paths /v1/images/* added"),
    "a network": ({"allow_cidr": "10.0.0.0/8"}, "allow_cidr 10.0.0.0/8 added"),
    "a tenant": (
        {"api_key": f"acme:{KEY},yoyo:{OTHER_KEY}"},
        "keys of yoyo added; api_key: keys of zeta",
    ),
    "fewer keys": ({"api_key": f"acme:{KEY}"}, "api_key: keys of zeta removed"),
    "a slip": ({"api_key": f"acme:{KEY},zeta={OTHER_KEY}"}, "api_key: key 2: a tenant ends with"),
    "a token": ({"admin_token": "another-token-of-theirs"}, "admin_token is another one"),
    "another salt": ({"cache_salt_secret": "f" * 16}, "cache_salt_secret is another one"),
    "a salted path": ({"salted_paths": "/v1/messages"}, "salted_paths /v1/messages added"),
    "no headers": ({"response_headers": False}, "response_headers is false"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MOVES)
async def test_what_changes_about_access_is_said(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed, said = MOVES[name]
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        instances, log = addresses(fleet), str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, instances, **CLOSED) as (proxy, path):
            rewrite(path, toml(instances, request_log=log, **(CLOSED | changed)))
            assert await proxy.server.reloader.reload("test") == "applied"
            found = [r for r in caplog.records if "access changes" in r.getMessage()]
            (line,) = [r.getMessage() for r in found if r.levelname == "WARNING"]
            assert said in line
            assert KEY not in caplog.text


async def test_what_is_not_about_access_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        instances, log = addresses(fleet), str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, instances, **CLOSED) as (proxy, path):
            rewrite(path, toml(instances, request_log=log, ttft_slo=1.0, **CLOSED))
            assert await proxy.server.reloader.reload("test") == "applied"
            assert "access changes" not in caplog.text


def test_a_new_process_takes_no_address_that_others_reach() -> None:
    """As a file without its line `host = 127.0.0.1` would have it."""
    closed = Settings(instances="a:1", host="127.0.0.1", admin_port=1)
    for open_ in ({"admin_port": 1}, {"host": "127.0.0.1"}):
        with pytest.raises(ConfigError, match="would be"):
            Fence().refuse_opening(closed, Settings(instances="a:1", **open_))
    Fence().refuse_opening(closed, closed)


def rotated(count: int, which: str) -> Settings:
    """Clients' keys, all of them others for another `which`."""
    return Settings(
        instances="a:1", api_key="\n".join(f"t{i}:{i:08}-{which}-0123456789" for i in range(count))
    )


def test_many_keys_that_change_take_a_step_each() -> None:
    """The calls grow as the keys do; each was compared with each."""
    calls = []
    for count in (400, 800):
        old, new, fence = rotated(count, "a"), rotated(count, "b"), Fence()

        def compare(old: Settings = old, new: Settings = new, fence: Fence = fence) -> None:
            fence.refuse_opening(old, new)
            changes(old, new)

        calls.append(calls_of(compare))
    assert calls[1] < 2.2 * calls[0]


def test_the_same_keys_are_not_compared() -> None:
    old, new, fence = rotated(400, "a"), rotated(400, "a"), Fence()
    fence.refuse_opening(old, old)
    assert calls_of(lambda: changes(old, new)) < 400
    assert calls_of(lambda: Access(new).use(old)) < 400, "digests are made where options are read"


CUT_KEY = f"acme:{KEY},zeta:{OTHER_KEY[:18]}"


@pytest.mark.parametrize(
    "between",
    [(f"acme:{KEY}",), (f"acme:{KEY}", "yoyo:sk-yoyo-0123456789abcdef"), (f"acme:{KEY}",) * 3],
)
def test_the_rest_of_a_key_that_was_removed_before_is_no_key(between: tuple[str, ...]) -> None:
    fence, in_force = Fence(), Settings(instances="a:1", api_key=CLOSED["api_key"])
    for keys in between:
        new = Settings(instances="a:1", api_key=keys)
        fence.refuse_opening(in_force, new)
        in_force = new
    with pytest.raises(ConfigError, match="key 2 is the start of an earlier one"):
        fence.refuse_opening(in_force, Settings(instances="a:1", api_key=CUT_KEY))
    fence.refuse_opening(in_force, Settings(instances="a:1", api_key=CLOSED["api_key"]))


def test_the_rest_of_an_earlier_token_is_no_token() -> None:
    fence = Fence()
    tokens = [f"{word}-token-of-operators" for word in ("first", "second")]
    first, second = (Settings(instances="a:1", admin_token=token) for token in tokens)
    fence.refuse_opening(first, second)
    with pytest.raises(ConfigError, match="admin_token: it is the start of an earlier one"):
        fence.refuse_opening(second, Settings(instances="a:1", admin_token=tokens[0][:-1]))


def test_earlier_secrets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_changes, "EARLIER_CHARS", 30)
    earlier = Earlier()
    for text in ("a" * 20, "b" * 20, "c" * 10, "b" * 20):
        earlier.note(SecretStr(text), [text])
    assert list(earlier) == ["c" * 10, "b" * 20]


async def test_a_removed_key_that_comes_back_cut_is_refused(tmp_path: Path) -> None:
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        instances, log = addresses(fleet), str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, instances, api_key=CLOSED["api_key"]) as (proxy, path):
            for keys, result in ((f"acme:{KEY}", "applied"), (CUT_KEY, "refused")):
                rewrite(path, toml(instances, request_log=log, api_key=keys))
                assert await proxy.server.reloader.reload("test") == result
            head = {"Authorization": f"Bearer {OTHER_KEY[:18]}"}
            got = await status(proxy, "POST", "/v1/chat/completions", json=chat("x"), headers=head)
            assert got == 401


async def test_two_reloads_at_once_are_compared_one_after_the_other(tmp_path: Path) -> None:
    """The second is held against what the first has made of the keys."""
    async with SimFleet(1, speed=50.0, tick=0.0) as fleet:
        instances, log = addresses(fleet), str(tmp_path / "log.jsonl")
        async with from_file(tmp_path, instances, api_key=f"acme:{KEY}") as (proxy, path):
            reloader = proxy.server.reloader
            rewrite(path, toml(instances, request_log=log, api_key=CLOSED["api_key"]))
            both = await asyncio.gather(*(reloader.reload(why) for why in ("one", "two")))
            assert both == ["applied", "unchanged"]
