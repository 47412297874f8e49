"""The live page as HTML: escaped, and whole where there is nothing to show."""

from __future__ import annotations

from proxy.admin.page.html import Parts, page, tag, text
from proxy.admin.page.snapshot import decision
from proxy.core.types import Outcome
from proxy.telemetry.record import RequestRecord
from tests.support.live_page import SEEN


def test_attributes_and_texts_are_escaped() -> None:
    made = tag("a", text("<b>&"), href='"><x>', data_l="'", class_="c")
    assert made == ('<a href="&quot;&gt;&lt;x&gt;" data-l="&#x27;" class="c">&lt;b&gt;&amp;</a>')


def test_an_error_with_markup_is_text() -> None:
    evil = "<img src=x onerror=alert(1)>"
    record = RequestRecord(request_id='"><b>', t_proxy_recv=1.0, decode_instance="d", place="home")
    record.outcome, record.error = Outcome.UPSTREAM_ERROR, evil
    found = Parts().of(SEEN | {"decisions": [decision(record)]})["decisions"]
    assert "<img" not in found
    assert "&lt;img" in found
    assert 'href="ui/decisions/%22%3E%3Cb%3E"' in found


def test_a_proxy_without_anything_has_a_page() -> None:
    found = page(Parts().of(SEEN))
    for said in ("No request was placed", "No request waits", "No first token", "<li>w</li>"):
        assert said in found


def test_a_value_has_its_limit_and_a_bar() -> None:
    row = {
        "name": "a",
        "marks": ["hot"],
        "state": "healthy",
        "since": 0.0,
        "since_said": "1970-01-01 00:00",
        "why": "",
        **dict.fromkeys(("prefilling", "decoding", "ongoing_tokens", "sessions"), 0),
        **dict.fromkeys(("running", "waiting", "hit_ratio", "ttft_s", "predicted_ttft_s")),
        "prefill_tokens": 30,
        "prefill_limit": 20,
        "prefill_tps": 1,
        "kv_ratio": 0.25,
        "kv_limit": 0.5,
    }
    found = Parts().of(SEEN | {"instances": [row]})["fleet"]
    for said in (
        "30 / 20<svg ",
        'class="bad"><rect width="100" ',
        "25 % / 50 %<svg",
        'class="ok"><rect width="25" ',
        '<time datetime="1970-01-01T00:00:00Z">1970-01-01 00:00</time>',
        '<span class="mark">hot</span>',
        '<span class="word ok">healthy</span>',
    ):
        assert said in found


def test_only_what_has_changed_is_made_again() -> None:
    parts = Parts()
    first, same = parts.of(SEEN), parts.of({**SEEN, "at": 1.0})
    assert {name for name in first if first[name] is not same[name]} == {"asof", "fleet"}
    verdict = SEEN["verdict"] | {"load": "other"}
    other = parts.of(SEEN | {"verdict": verdict})
    assert "other" in other["load"]
    assert other["verdict"] == first["verdict"]
