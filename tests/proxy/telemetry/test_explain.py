"""Explanations of decisions: true to the record, and plain about what cannot be told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.placement.policies import POLICIES
from proxy.core.types import Place, Reason
from proxy.telemetry.explain import PLACES, REASONS, TERMS, Explained
from tests.support.admin import call
from tests.support.harness import chat, proxied, words

LOW = {"heavy_threshold": 500, "warm_threshold": 100}
DECISIONS = 20


def record(**fields: Any) -> dict[str, Any]:
    """A made-up record: a computes and answers, b would have cost 0.2 s more."""
    return {
        "request_id": "r",
        "decode_instance": "a",
        "prefill_instance": None,
        "place": "home",
        "offload_decision_reason": "below_threshold",
        "policy": "cost",
        "model": "m",
        "isl_tokens": 43_000,
        "hit_tokens": 41_000,
        "t_proxy_recv": 1000.0,
        "t_decided": 1000.01,
        "t_decode_sent": 1000.02,
        "t_first_token": 1000.5,
        "t_done": 1002.0,
        "predicted_ttft_s": 0.4,
        "candidates": [
            {"instance": "a", "prefill": None, "cost_s": 1.0, "ttft_s": 0.4, "hit_tokens": 41_000},
            {"instance": "b", "prefill": None, "cost_s": 1.2, "ttft_s": 0.9, "hit_tokens": 0},
            {"instance": "a", "prefill": "b", "cost_s": 1.5, "ttft_s": 0.9, "hit_tokens": 0},
        ],
        "outcome": "ok",
    } | fields


def test_every_place_and_reason_has_words() -> None:
    assert set(PLACES) == set(Place)
    assert set(REASONS) == set(Reason)


def test_a_sentence_says_where_why_by_how_much_and_what_came() -> None:
    said = Explained(record()).sentence
    for part in (
        "a, where its session lives (home)",
        "41k of 43k tokens cached",
        "(below_threshold)",
        "0.20 s cheaper than b",
        "predicted in 0.40 s, came in 0.50 s",
    ):
        assert part in said, said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prefill_instance": "b"}, "b computes the prompt for a, where"),
        ({"prefill_instance": "b"}, "0.50 s dearer than a"),
        ({"outcome": None, "t_done": None, "t_first_token": None}, "not over yet"),
        ({"outcome": "upstream_error", "error": "reset"}, "ended: upstream_error (reset)"),
        ({"t_queued": 999.0, "t_decided": 1000.0}, "waited 1.00 s"),
        ({"candidates": []}, "(home)"),
        ({"candidates": None}, "(home)"),
    ],
)
def test_what_else_a_sentence_says(fields: dict[str, Any], said: str) -> None:
    assert said in Explained(record(**fields)).sentence


def test_a_refusal_names_who_was_past_what() -> None:
    past = [{"instance": "a", "past": ["decode_blocks"], "free_in_s": 0.4}]
    fields = {"decode_instance": None, "place": None, "offload_decision_reason": None}
    refused = Explained(
        record(candidates=past, outcome="rejected", error="queue_timeout", **fields)
    )
    assert refused.sentence == "refused (queue_timeout); busy: a (decode_blocks)"
    assert "free in" in refused.text()
    with pytest.raises(ValueError, match="no policy had a choice"):
        refused.instead("cost")


def test_a_migrated_stream_was_decided_for_where_it_began() -> None:
    moved = {"from_instance": "a", "to_instance": "b"}
    explained = Explained(record(decode_instance="b", migrations=[moved]))
    assert explained.chosen is not None
    assert explained.chosen["instance"] == "a"


def test_without_prices_of_pairs_the_roles_are_marked() -> None:
    rows = [{"instance": name, "prefill": None, "cost_s": None, "ttft_s": 1.0} for name in "abc"]
    explained = Explained(record(prefill_instance="b", candidates=rows, policy="always"))
    assert [row[0] for row in explained.candidates()[1]] == ["decodes", "prefills", ""]
    assert explained.margin_s is None


def test_the_wait_and_lost_attempts_are_no_part_of_the_time_to_the_first_token() -> None:
    assert Explained(record(t_queued=1000.0, t_decided=1000.25)).ttft_s == 0.25
    assert Explained(record(retries=1, t_decode_sent=1000.25)).ttft_s == 0.25


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"t_proxy_recv": None}, "t_proxy_recv"),
        ({"t_done": "late"}, "t_done"),
        ({"candidates": 7}, "candidates"),
        ({"candidates": [{"instance": "a", "cost_s": "much"}]}, "candidates"),
        ({"migrations": [7]}, "migrations"),
    ],
)
def test_another_form_is_one_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Explained(record(**change))


@pytest.mark.parametrize("lacking", ["place", "candidates", "t_proxy_recv"])
def test_an_older_line_names_what_it_lacks(lacking: str) -> None:
    older = record()
    del older[lacking]
    with pytest.raises(ValueError, match=rf"no {lacking}: a line of an older form"):
        Explained(older)


def test_a_line_without_columns_is_not_decided_again() -> None:
    with pytest.raises(ValueError, match="this record has no columns"):
        Explained(record()).instead("cost")
    with pytest.raises(ValueError, match="'best' is none of cost, "):
        Explained(record(columns={})).instead("best")
    with pytest.raises(ValueError, match="columns: of another form"):
        Explained(record(columns={"free": 1})).instead("cost")


def test_what_a_terminal_shows_has_no_control_characters() -> None:
    odd = "\x1b[31m\n<script>"
    explained = Explained(record(model=odd, error=odd, outcome="upstream_error", request_id=odd))
    assert "\x1b" not in explained.text()
    assert len(explained.text().splitlines()) == len(Explained(record()).text().splitlines())


@pytest.mark.parametrize("policy", ["cost", "always"])
async def test_twenty_decisions_have_the_reason_that_the_log_has(
    tmp_path: Path, policy: str
) -> None:
    """And the policy that decided finds the same choice again in what is stored."""
    async with proxied(tmp_path, 3, sim={"speed": 5.0}, offload_policy=policy, **LOW) as (proxy, _):
        for round_ in range(2):
            await asyncio.gather(
                *(
                    proxy.post(
                        chat(words(50 + 500 * i), max_tokens=40),
                        headers={
                            "X-Request-Id": f"r{round_}.{i}",
                            "X-Session-ID": f"s{i % 4}",
                        },
                    )
                    for i in range(DECISIONS // 2)
                )
            )
        logged = {row["request_id"]: row for row in await proxy.records(DECISIONS)}
        assert len(logged) == DECISIONS
        for request_id, row in logged.items():
            _, told = await call(proxy, "GET", f"/decisions/{request_id}")
            explained = Explained(told)
            for name in ("place", "offload_decision_reason"):
                assert f"({row[name]})" in explained.sentence
            assert row["decode_instance"] in explained.sentence
            assert explained.sentence == Explained(row).sentence, "of the log alone, too"
            again = explained.instead(row["policy"])
            assert (again["agrees"], again["reason"]) == (True, row["offload_decision_reason"])
            assert again["costs_more_s"] == (0 if policy == "cost" else None)
            assert [one["policy"] for one in explained.as_json(list(POLICIES))["instead"]] == list(
                POLICIES
            )
            assert explained.chosen is not None
            if policy == "cost":
                total_s = sum(explained.chosen[term] for term in TERMS)
                assert total_s == pytest.approx(explained.chosen["cost_s"], abs=0.001)
            assert orjson.dumps(explained.as_json())
        offloaded = [row for row in logged.values() if row["prefill_instance"] is not None]
        assert offloaded or policy == "cost"
