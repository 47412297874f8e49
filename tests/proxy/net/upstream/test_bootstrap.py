"""The engine's id in a bootstrap server's answer, and answers that hold none."""

from __future__ import annotations

import pytest

from proxy.net.upstream.bootstrap import ENGINE_ID_CHARS, read_engine_id
from proxy.protocol.errors import UpstreamFailure


def test_the_id_of_rank_0() -> None:
    body = b'{"1":{"engine_id":"b"},"0":{"engine_id":"a","worker_addr":{}}}'
    assert read_engine_id(body) == "a"


@pytest.mark.parametrize("body", [b"{}", b'{"1":{"engine_id":"b"}}', b'{"0":{}}'])
def test_no_engine_is_registered_yet(body: bytes) -> None:
    assert read_engine_id(body) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"0": [',
        b'{"0": "a"}',
        b'{"0":{"engine_id":7}}',
        b'{"0":{"engine_id":""}}',
        b'{"0":{"worker_addr":{}}}',
        b'{"0":{"engine_id":"%s"}}' % (b"x" * (ENGINE_ID_CHARS + 1)),
    ],
)
def test_another_answer_is_a_failure(body: bytes) -> None:
    with pytest.raises(UpstreamFailure):
        read_engine_id(body)
