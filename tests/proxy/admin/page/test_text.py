"""The live page as text: every part, and nothing that a terminal would obey."""

from __future__ import annotations

from proxy.admin.page.text import page
from tests.support.live_page import SEEN


def test_a_proxy_without_anything_has_a_page() -> None:
    told = page(SEEN)
    for said in ("healthy: f\nl\nw\n", "Instances: none", "Last decisions: none", "Waits: none"):
        assert said in told


def test_the_numbers_are_those_of_the_page() -> None:
    given = SEEN["numbers"] | {"requests": 12, "failed": 3, "ttft_s": 0.25, "ttft_p90_s": 1.5}
    told = [line.split(maxsplit=1) for line in page(SEEN | {"numbers": given}).splitlines()]
    named = {line[0]: " ".join(line[1:]).split() for line in told if line}
    assert named["requests"] == ["12", "in", "60", "s"]
    assert named["failed"] == ["3", "in", "60", "s"]
    assert named["offloads"] == ["0", "in", "60", "s"]
    assert named["first"] == ["token", "0.25", "s", "median;", "90", "%:", "1.50", "s"]


def test_control_characters_are_escaped() -> None:
    row = {"at": 0.0, "request_id": "r\x1b", "sentence": "\x1b[2J\n"}
    verdict = SEEN["verdict"] | {"fleet": "\x1b[31m"}
    told = page(SEEN | {"decisions": [row], "verdict": verdict})
    assert "\x1b" not in told
    assert r"\u001b[2J\u000a" in told
