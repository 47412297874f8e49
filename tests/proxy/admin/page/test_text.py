"""The live page as text: every part, and nothing that a terminal would obey."""

from __future__ import annotations

from proxy.admin.page.text import page
from tests.support.live_page import SEEN


def test_a_proxy_without_anything_has_a_page() -> None:
    told = page(SEEN)
    for said in ("f\nl\nw\n", "Instances: none", "Last decisions: none", "Waits: none"):
        assert said in told


def test_control_characters_are_escaped() -> None:
    row = {"at": 0.0, "request_id": "r\x1b", "sentence": "\x1b[2J\n"}
    verdict = SEEN["verdict"] | {"fleet": "\x1b[31m"}
    told = page(SEEN | {"decisions": [row], "verdict": verdict})
    assert "\x1b" not in told
    assert r"\u001b[2J\u000a" in told
