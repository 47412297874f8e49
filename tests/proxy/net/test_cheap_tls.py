"""TLS contexts: what a peer may choose, read from the first bytes of handshakes."""

from __future__ import annotations

import ssl

import pytest

from proxy.config.options import Settings
from proxy.net import tls
from proxy.net.cheap_tls import by_the_system
from tests.support.certificates import Certificates

SUPPORTED_GROUPS, KEY_SHARE = 10, 51
FINITE_FIELDS = range(0x100, 0x105)
"""ffdhe2048 to ffdhe8192 (RFC 7919)."""


def sized(data: bytes, width: int = 2) -> bytes:
    return len(data).to_bytes(width, "big") + data


def extension(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2, "big") + sized(data)


def hello_of(group: int) -> bytes:
    """A TLS 1.3 hello of a client that knows one group, and has no share of it yet."""
    extensions = b"".join(
        (
            extension(43, sized(b"\x03\x04", 1)),
            extension(13, sized(b"\x04\x03\x08\x04")),
            extension(SUPPORTED_GROUPS, sized(group.to_bytes(2, "big"))),
            extension(KEY_SHARE, sized(b"")),
        )
    )
    suites, no_compression = sized(b"\x13\x01"), b"\x01\x00"
    body = b"\x03\x03" + bytes(32) + sized(b"", 1) + suites + no_compression + sized(extensions)
    return b"\x16\x03\x01" + sized(b"\x01" + sized(body, 3))


def groups_in(hello: bytes) -> list[int]:
    """The groups that a client's hello names."""
    at = 5 + 4 + 2 + 32
    at += 1 + hello[at]
    at += 2 + int.from_bytes(hello[at : at + 2], "big")
    at += 1 + hello[at] + 2
    while int.from_bytes(hello[at : at + 2], "big") != SUPPORTED_GROUPS:
        at += 4 + int.from_bytes(hello[at + 2 : at + 4], "big")
    size = int.from_bytes(hello[at + 4 : at + 6], "big")
    listed = hello[at + 6 : at + 6 + size]
    return [int.from_bytes(listed[i : i + 2], "big") for i in range(0, size, 2)]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("ca"))


def contexts(certs: Certificates) -> dict[str, ssl.SSLContext]:
    cert, key = certs.leaf("proxy", "127.0.0.1")
    listener = tls.for_clients(Settings(instances="a=a:1", tls_cert=cert, tls_key=key))
    assert listener is not None
    own = tls.for_instances(Settings(instances="a=a:1", instance_ca=certs.ca))
    return {"listener": listener, "own CA": own, "system": by_the_system()}


@pytest.mark.parametrize("which", ["listener", "own CA", "system"])
def test_nobody_chooses_a_finite_field(certs: Certificates, which: str) -> None:
    context = contexts(certs)[which]
    kinds = {c["kea"] for c in context.get_ciphers()}
    assert kinds <= {"kx-ecdhe", "kx-any"}
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("group", FINITE_FIELDS)
def test_a_listener_agrees_on_no_finite_field(certs: Certificates, group: int) -> None:
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = contexts(certs)["listener"].wrap_bio(received, sent, server_side=True)
    received.write(hello_of(group))
    with pytest.raises(ssl.SSLError, match=r"(?i)no.suitable|handshake"):
        server.do_handshake()


def test_a_listener_agrees_on_the_curve_that_all_know(certs: Certificates) -> None:
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = contexts(certs)["listener"].wrap_bio(received, sent, server_side=True)
    received.write(hello_of(0x17))
    with pytest.raises(ssl.SSLWantReadError):
        server.do_handshake()
    assert sent.read()[0] == 0x16, "it asks for a share"


@pytest.mark.parametrize("which", ["own CA", "system"])
def test_an_instance_is_offered_no_finite_field(certs: Certificates, which: str) -> None:
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts(certs)[which].wrap_bio(received, sent, server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    groups = groups_in(sent.read())
    assert groups
    assert not set(groups) & set(FINITE_FIELDS)
