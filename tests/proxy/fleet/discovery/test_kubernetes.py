"""The pods of a service come and go as its API tells, also where the API fails."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.config.values import DiscoverAt
from proxy.fleet.discovery import base, kubernetes
from proxy.fleet.discovery.base import DiscoveryError
from proxy.fleet.discovery.kubernetes import Api, Kubernetes, Times
from tests.proxy.fleet.discovery.conftest import Begins, Found
from tests.support.certificates import Certificates
from tests.support.harness import until
from tests.support.slices_api import NAMESPACE, SERVICE, SlicesApi, a_slice, account, endpoint

AT = DiscoverAt("k8s", NAMESPACE, SERVICE)
A, B, C = (endpoint(pod, f"10.0.0.{at}") for at, pod in enumerate("abc", 1))
LONG = Times(list_s=20, quiet_s=60, watch_s=60, tell_s=0.02)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return account(tmp_path / "account")


def service(api: SlicesApi, home: Path, times: Times = LONG) -> dict[str, Kubernetes]:
    return {str(AT): Kubernetes(AT, Api(api.url, home), times)}


def fails(found: Found, why: str) -> bool:
    return why in found.discovery.faults.get(str(AT), "")


async def watched(api: SlicesApi) -> None:
    await until(lambda: api.watches == 1, "a watch")


async def test_pods_come_and_go(api: SlicesApi, home: Path, discovering: Begins) -> None:
    api.put(a_slice("s", A))
    api.put(a_slice("other", C, service="other"))
    async with discovering(service(api, home)) as found:
        assert found.fleet == "a", "what is there at the start is there at once"
        await watched(api)
        api.put(a_slice("t", B))
        await found.becomes("a b")
        over = found.hold("b")
        api.put(a_slice("t", endpoint("b", "10.0.0.2", terminating=True)))
        await found.becomes("a b-")
        api.delete("t")
        api.bookmark()
        await found.becomes("a b-")
        over()
        await found.becomes("a")
        assert found.members.sources("a") == ["discovery"]
    assert api.tokens == {"Bearer a-token"}


async def test_a_pod_that_is_not_ready_gets_no_new_request(
    api: SlicesApi, home: Path, discovering: Begins
) -> None:
    api.put(a_slice("s", A, endpoint("b", "10.0.0.2", ready=False)))
    async with discovering(service(api, home)) as found:
        assert found.fleet == "a"
        await watched(api)
        api.put(a_slice("s", A, B))
        await found.becomes("a b")
        over = found.hold("b")
        api.put(a_slice("s", A, endpoint("b", "10.0.0.2", ready=False)))
        await found.becomes("a b-")
        api.put(a_slice("s", A, B))
        await found.becomes("a b")
        over()


async def test_a_lost_deletion_is_found_by_the_next_list(
    api: SlicesApi, home: Path, discovering: Begins
) -> None:
    api.put(a_slice("s", A))
    api.put(a_slice("t", B))
    async with discovering(service(api, home)) as found:
        await watched(api)
        api.delete("t", is_told=False)
        api.bookmark()
        assert found.fleet == "a b"
        api.cut()
        await found.becomes("a")


async def test_410_as_an_event_and_as_a_status(
    api: SlicesApi, home: Path, discovering: Begins, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(a_slice("s", A))
    async with discovering(service(api, home)) as found:
        await watched(api)
        api.put(a_slice("t", B), is_told=False)
        api.tell("ERROR", {"kind": "Status", "code": 410, "message": "too old"})
        await found.becomes("a b")
        api.statuses["watch"] = 410
        api.put(a_slice("u", C), is_told=False)
        api.cut()
        await found.becomes("a b c")
        api.statuses.clear()
        await watched(api)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_watch_that_is_half_open_ends(
    api: SlicesApi, home: Path, discovering: Begins
) -> None:
    api.put(a_slice("s", A))
    async with discovering(service(api, home, Times(quiet_s=0.05))) as found:
        await watched(api)
        api.is_silent = True
        api.put(a_slice("t", B))
        await found.becomes("a b")


async def test_a_watch_ends_after_its_time(api: SlicesApi, home: Path, discovering: Begins) -> None:
    api.put(a_slice("s", A))
    async with discovering(service(api, home, Times(watch_s=0.05))):
        await until(lambda: api.count("watch") >= 3)
    assert api.count("list") >= 3
    query = next(query for kind, query in api.asked if kind == "watch")
    assert query["resourceVersion"] == "101"
    assert query["allowWatchBookmarks"] == "true"


async def test_an_api_that_is_gone_and_back(
    api: SlicesApi, home: Path, discovering: Begins, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(a_slice("s", A, B))
    async with discovering(service(api, home)) as found:
        await watched(api)
        await api.gone()
        await until(lambda: found.discovery.faults)
        age_s = found.discovery.ages_s()[str(AT)]
        await until(lambda: found.discovery.ages_s()[str(AT)] > age_s, "it grows older")
        assert found.fleet == "a b"
        api.put(a_slice("s", A, C))
        await api.back()
        await found.becomes("a c")
        assert not found.discovery.faults
    told = [r.getMessage() for r in caplog.records if "the last set of 2 stays" in r.getMessage()]
    assert told
    assert len(told) == len({*told}), "one line for each cause"


CUT = orjson.dumps({"type": "ADDED", "object": a_slice("t", B)}) + b"\n"
FAULTS: dict[str, tuple[dict[str, int], bytes | None, str]] = {
    "401": ({"list": 401}, None, "the API answers 401: the token is not accepted"),
    "403": ({"list": 403}, None, "the API answers 403: the Role lacks endpointslices"),
    "403 of the watch": ({"watch": 403}, None, "the API answers 403: the Role lacks endpointslice"),
    "404": ({"list": 404}, None, "the API answers 404: is this a Kubernetes API?"),
    "410": ({"list": 410}, None, "the API answers 410"),
    "500": ({"list": 500}, None, "the API answers 500"),
    "garbage": ({}, b"<html>", "its answer is not JSON"),
    "another form": ({}, b'{"items":[]}', "another form than Kubernetes': metadata"),
    "too many values": ({}, b"[" + b"[]," * 99_999 + b"0]", "its answer has too many values"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_while_the_api_fails_the_last_set_stays(
    fault: str,
    api: SlicesApi,
    home: Path,
    discovering: Begins,
    caplog: pytest.LogCaptureFixture,
) -> None:
    statuses, raw, why = FAULTS[fault]
    api.put(a_slice("s", A, B))
    async with discovering(service(api, home)) as found:
        await watched(api)
        api.statuses, api.raw_list = statuses, raw
        api.cut()
        await until(lambda: found.discovery.faults)
        assert why in found.discovery.faults[str(AT)]
        assert found.fleet == "a b"
        api.put(a_slice("s", A, C), is_told=False)
        api.statuses, api.raw_list = {}, None
        await found.becomes("a c")
        await until(lambda: not found.discovery.faults)
    told = [r.getMessage() for r in caplog.records if why in r.getMessage()]
    assert len(told) == 1, "one line, however often it fails"
    assert told[0].startswith(f"discovery {AT}: ")


async def test_a_list_without_end_is_refused(
    api: SlicesApi, home: Path, discovering: Begins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "LIST_BYTES", 1 << 16)
    api.raw_list, api.is_endless = b" " * 4096, True
    async with discovering(service(api, home)) as found:
        assert found.discovery.faults == {str(AT): "its list has more than 65536 bytes"}
        api.raw_list, api.is_endless = None, False
        api.put(a_slice("s", A))
        await found.becomes("a")


async def test_a_list_that_does_not_come(api: SlicesApi, home: Path) -> None:
    api.statuses["list"] = 0
    of = Kubernetes(AT, Api(api.url, home), Times(list_s=0.1))
    with pytest.raises(DiscoveryError, match=r"no list in 0\.1 s"):
        await of.look()


async def test_lines_of_a_watch(
    api: SlicesApi, home: Path, discovering: Begins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "LINE_BYTES", 1 << 12)
    api.put(a_slice("s", A))
    async with discovering(service(api, home)) as found:
        await watched(api)
        api.send(CUT[:40])
        api.send(CUT[40:])
        await found.becomes("a b")
        for garbage, why in ((b"{]\n", "not JSON"), (b"x" * 5000, "more than 4096 bytes")):
            api.put(a_slice("s", A, B), is_told=False)
            api.send(garbage)
            await until(partial(fails, found, why))
            await found.becomes("a b")
            await until(lambda: not found.discovery.faults)
            await watched(api)


async def test_a_set_is_told_when_it_has_changed(api: SlicesApi, home: Path) -> None:
    api.put(a_slice("s", A))
    told: list[list[str]] = []

    async def tell(found: base.Found) -> None:
        told.append([spec.name for spec in found.instances])

    task = asyncio.create_task(service(api, home)[str(AT)].follow(tell))
    await watched(api)
    for _ in range(9):
        api.bookmark()
    api.put(a_slice("s", A))
    api.bookmark()
    await asyncio.sleep(5 * kubernetes.REST_S)
    assert told == [["a"]]
    api.put(a_slice("t", B))
    api.put(a_slice("u", C))
    await until(lambda: told[-1] == ["a", "b", "c"])
    api.cut()
    await task


async def test_a_watch_proves_a_set_that_stays(
    api: SlicesApi, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "PROVEN_S", 0.0)
    api.put(a_slice("s", A))
    told: list[list[str]] = []

    async def tell(found: base.Found) -> None:
        told.append([spec.name for spec in found.instances])

    task = asyncio.create_task(service(api, home)[str(AT)].follow(tell))
    await watched(api)
    api.bookmark()
    await until(lambda: told == [["a"], ["a"]])
    api.cut()
    await task


async def test_an_address_that_no_url_can_have_ends_nothing(
    api: SlicesApi, home: Path, discovering: Begins
) -> None:
    api.put(a_slice("s", A, B))
    async with discovering(service(api, home)) as found:
        await watched(api)
        api.put(a_slice("t", endpoint("c", "2001:db8::1%]"), kind="IPv6"))
        await until(partial(fails, found, "another form than Kubernetes': addresses"))
        assert found.fleet == "a b"


async def test_an_empty_list_takes_nothing_away(
    api: SlicesApi, home: Path, discovering: Begins, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(a_slice("s", A, B))
    async with discovering(service(api, home)) as found:
        await watched(api)
        api.delete("s")
        await until(lambda: found.discovery.faults)
        assert found.fleet == "a b"
        api.put(a_slice("s", endpoint("a", "10.0.0.1", terminating=True)))
        await found.becomes("b")
        api.put(a_slice("s", C))
        await found.becomes("c")
    assert "it tells no instance that may be used; the last set of 2 stays" in caplog.text


async def test_an_empty_list_at_the_start_is_an_answer(
    api: SlicesApi, home: Path, discovering: Begins
) -> None:
    async with discovering(service(api, home)) as found:
        assert (found.fleet, found.discovery.faults) == ("", {})
        await watched(api)
        api.put(a_slice("s", A))
        await found.becomes("a")


async def test_a_pod_of_the_same_name_at_another_address(
    api: SlicesApi, home: Path, discovering: Begins
) -> None:
    """As a StatefulSet makes it: the old one drains, then the new one comes."""
    api.put(a_slice("s", A))
    async with discovering(service(api, home)) as found:
        await watched(api)
        over = found.hold("a")
        api.put(a_slice("s", endpoint("a", "10.0.0.9")))
        await found.becomes("a-")
        over()
        await until(lambda: found.url("a") == "http://10.0.0.9:8000")
        assert found.fleet == "a"


async def test_a_new_pod_at_the_address_of_one_that_drains(
    api: SlicesApi, home: Path, discovering: Begins
) -> None:
    api.put(a_slice("s", A))
    async with discovering(service(api, home)) as found:
        await watched(api)
        over = found.hold("a")
        api.put(a_slice("s", endpoint("d", "10.0.0.1")))
        await found.becomes("a-")
        over()
        await found.becomes("d")


async def test_tokens_are_read_anew(api: SlicesApi, home: Path, discovering: Begins) -> None:
    api.put(a_slice("s", A))
    async with discovering(service(api, home)):
        await watched(api)
        account(home, "another")
        api.cut()
        await until(lambda: "Bearer another" in api.tokens)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("token", None, "No such file"),
        ("token", "two words", "token is not one word"),
        ("token", "a\r\nb", "token is not one word"),
        ("ca.crt", None, "No such file"),
        ("ca.crt", "no certificate", "service account"),
        ("ca.crt", "\xff", "service account"),
    ],
)
async def test_a_service_account_that_cannot_be_used(
    name: str, text: str | None, why: str, home: Path
) -> None:
    (home / name).unlink()
    if text is not None:
        (home / name).write_text(text)
    with pytest.raises(DiscoveryError, match=why) as caught:
        await Kubernetes(AT, Api("https://127.0.0.1:9", home), LONG).look()
    assert "\n" not in str(caught.value)
    assert "a-token" not in str(caught.value)


async def test_tls_by_the_ca_of_the_account(tmp_path: Path) -> None:
    ours, theirs = Certificates(tmp_path / "ours"), Certificates(tmp_path / "theirs")
    async with SlicesApi(ours.server("127.0.0.1")) as api:
        api.put(a_slice("s", A))
        home = account(tmp_path / "account", ca=ours.ca)
        found = await Kubernetes(AT, Api(api.url, home), LONG).look()
        assert [spec.name for spec in found.instances] == ["a"]
        account(home, ca=theirs.ca)
        with pytest.raises(DiscoveryError, match="TLS: "):
            await Kubernetes(AT, Api(api.url, home), LONG).look()


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "https://10.96.0.1:443"),
        (
            {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"},
            "https://[fd00::1]:6443",
        ),
    ],
)
def test_where_the_api_is(environ: dict[str, str], url: str, home: Path) -> None:
    assert Api.named_by(environ, home).url == url


@pytest.mark.parametrize("more", [{}, {"KUBERNETES_SERVICE_PORT": "443"}])
def test_outside_a_pod(more: dict[str, Any], home: Path) -> None:
    with pytest.raises(DiscoveryError, match="is this a pod"):
        Api.named_by(more, home)
