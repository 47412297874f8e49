"""Instances as text: the forms that are read, and what is said about the others."""

import re

import pytest

from proxy.config.load import load
from proxy.config.sources import ConfigError
from proxy.config.values import (
    DiscoverAt,
    EventsAt,
    InstanceSpec,
    TenantWeight,
    events_text,
    header_list,
    weight_list,
)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("127.0.0.1:8001", InstanceSpec("127.0.0.1:8001", "http://127.0.0.1:8001")),
        ("https://gpu-1.lan:443/", InstanceSpec("gpu-1.lan:443", "https://gpu-1.lan:443")),
        ("a=GPU:1", InstanceSpec("a", "http://gpu:1")),
        ("a=http://g:1;bootstrap=8998", InstanceSpec("a", "http://g:1", "http://g:8998")),
        (" g:1;bootstrap=https://b:2 ", InstanceSpec("g:1", "http://g:1", "https://b:2")),
        ("h", InstanceSpec("h:8000", "http://h:8000")),
        ("a=10.0.0.1", InstanceSpec("a", "http://10.0.0.1:8000")),
        ("[::1];bootstrap=2", InstanceSpec("[::1]:8000", "http://[::1]:8000", "http://[::1]:2")),
        ("[::1]:8001", InstanceSpec("[::1]:8001", "http://[::1]:8001")),
        ("v6=[::1]:1;bootstrap=2", InstanceSpec("v6", "http://[::1]:1", "http://[::1]:2")),
        ("g:1; thermal=plugin", InstanceSpec("g:1", "http://g:1", thermal="plugin")),
        (
            "g:1;thermal=plugin;bootstrap=2",
            InstanceSpec("g:1", "http://g:1", "http://g:2", thermal="plugin"),
        ),
    ],
)
def test_instance_forms(text, spec):
    assert InstanceSpec.parse(text) == spec
    assert InstanceSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "'' is not host:port"),
        (":1", "':1' is not host:port"),
        ("h:0", "port 0 is not within 1 to 65535"),
        ("h:65536", "port 65536"),
        ("h:１", "is not host:port"),  # a full-width digit
        ("ftp://h:1", "is not host:port"),
        ("http://h:1/v1", "is not host:port"),
        ("http://h:1?a=b", "is not host:port"),
        ("h:1#x", "is not host:port"),
        ("h h:1", "is not host:port"),
        ("::1:80", "is not host:port"),
        ("[::1:80", "is not host:port"),
        ("[1.2.3.4]:80", "1.2.3.4"),
        ("10.0.0.256:1", "256"),
        ("127.1:1", "Expected 4 octets"),
        ("a=", "'' is not host:port"),
        ("=h:1", "name ''"),
        ("a b=h:1", "name 'a b'"),
        ("a\n=h:1\n", "name"),
        ("h:1;bootstrap=", "'' is not host:port"),
        ("h:1;bootstrap=h:2", "neither a port nor"),
        ("h:1;bootstrap=0", "port 0"),
        ("h:1;boot=2", "unknown part 'boot'"),
        ("h:1;bootstrap=2;bootstrap=3", "part bootstrap is given twice"),
        ("h:1;thermal=plugin;bootstrap=2;thermal=plugin", "part thermal is given twice"),
        ("h:1;thermal=", "thermal '' is not one of: plugin"),
        ("h:1;thermal=yes", "thermal 'yes' is not one of: plugin"),
        ("h:1,h:1", "name 'h:1' is given twice"),
        ("a=h:1,a=h:2", "name 'a' is given twice"),
        ("a=h:1,b=H:1", "address 'http://h:1' is given twice"),
        ("h:1,", "'' is not host:port"),
    ],
)
def test_bad_instances(text, part):
    with pytest.raises(ConfigError) as caught:
        load(["--instances", text], {})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("instances = ")
    assert part in message
    assert "(flag --instances)" in message
    assert "allowed: [name=]host:port" in message


def test_weights_of_tenants_read_back():
    weights = weight_list("a=4, team-b=0.5")
    assert weights == (TenantWeight("a", 4.0), TenantWeight("team-b", 0.5))
    assert weight_list([str(weight) for weight in weights]) == weights
    assert weight_list("") == ()


def test_headers_in_their_order():
    assert header_list("x-b, X-A,session_id") == ("x-b", "X-A", "session_id")
    assert header_list(["x-b"]) == ("x-b",)
    assert header_list("") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x a", "'x a' is not a header name, or is over 64 characters"),
        ("x-a:1", "'x-a:1' is not a header name"),
        ("é", "'é' is not a header name"),
        ("x" * 65, "is over 64 characters"),
        ("x-a,X-A", "header 'x-a' is given twice"),
        (",".join(f"x-{n}" for n in range(17)), "17 headers, at most 16"),
        ("Authorization", "'authorization' holds a secret"),
        ("x-a,cookie", "'cookie' holds a secret"),
    ],
)
def test_what_can_name_no_session(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        header_list(text)
    with pytest.raises(ConfigError, match=r"session.headers.*" + re.escape(words)):
        load(["--instances", "a:1", "--session-headers", text], {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "'a' is not tenant=weight"),
        ("a=", "weight '' is not within 0.1 to 100"),
        ("a=0", "weight '0' is not within"),
        ("a=1e9", "weight '1e9' is not within"),
        ("a=nan", "weight 'nan' is not within"),
        ("a=101", "weight '101' is not within"),
        ("a b=1", "is not tenant=weight"),
        ("a=1,a=2", "tenant 'a' is given twice"),
    ],
)
def test_a_bad_weight_is_named(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        weight_list(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tcp://{host}:5557", ("h", 5557, None)),
        ("tcp://{host}:5557;replay=5558", ("h", 5557, 5558)),
        ("tcp://{host}:{port+21000};replay={port}", ("h", 29001, 8001)),
        ("tcp://events.local:{port-8000}", ("events.local", 1, None)),
        ("tcp://[::1]:5557", ("::1", 5557, None)),
    ],
)
def test_where_kv_events_are(text, found):
    events_text(text)
    assert EventsAt.parse(text).of("h", 8001) == found


@pytest.mark.parametrize(
    "text",
    [
        *("", "on", "{host}:5557", "tcp://{host}", "tcp://{host}:0", "tcp://{host}:65536"),
        *("tcp://*:5557", "ipc:///tmp/x", "tcp://{host}:5557;replay=", "tcp://{host}:{port*2}"),
        *("tcp://{name}:5557", "tcp://{host}:5557;bootstrap=5558", "tcp://{host}:5557 "),
    ],
)
def test_what_is_no_place_of_kv_events(text):
    with pytest.raises(
        ValueError, match=r"is not an address of KV events|is not within 1 to 65535"
    ):
        events_text(text)


def test_a_port_that_an_instance_has_no_room_for():
    with pytest.raises(ValueError, match="port 68001 is not within 1 to 65535"):
        EventsAt.parse("tcp://{host}:{port+60000}").of("h", 8001)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dns://engines.example:8000", ("dns", "engines.example", "8000")),
        ("k8s://inference/vllm", ("k8s", "inference", "vllm")),
    ],
)
def test_places_where_instances_are_looked_for(text, parts):
    at = DiscoverAt.parse(text)
    assert (at.kind, at.scope, at.what) == parts
    assert str(at) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("file://x", "'file://x' begins with none of: dns://, k8s://"),
        ("engines:8000", "begins with none of"),
        ("dns://me:pw@engines:8000", "'dns://***@engines:8000' is not dns://NAME:PORT"),
        ("dns://engines", "is not dns://NAME:PORT"),
        ("dns://engines:0", "port 0 is not within 1 to 65535"),
        ("dns://engines:70000", "port 70000 is not within 1 to 65535"),
        ("k8s://vllm", "is not k8s://NAMESPACE/SERVICE"),
        ("k8s:///vllm", "is not k8s://NAMESPACE/SERVICE"),
        ("k8s://inference/vllm/x", "is not k8s://NAMESPACE/SERVICE"),
        ("k8s://Inference/vllm", "is not k8s://NAMESPACE/SERVICE"),
        ("dns://a:1,dns://a:1", "source 'dns://a:1' is given twice"),
    ],
)
def test_places_that_are_refused(text, why):
    with pytest.raises(ConfigError, match=r"discover = .* allowed: dns://NAME:PORT or k8s"):
        load(["--discover", text], {})
    with pytest.raises(ConfigError, match=re.escape(why)):
        load(["--discover", text], {})


def test_either_instances_or_a_discovery():
    assert load(["--discover", "dns://a:1"], {}).settings.instances == ()
    with pytest.raises(ConfigError, match=r"instances is not given: use .*; or --discover"):
        load([], {})
    with pytest.raises(ConfigError, match="none is given, and there is no --discover"):
        load(["--discover", ""], {})
