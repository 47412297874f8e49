"""What the live page shows of records and instances, as plain values."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.admin.page.snapshot import (
    DAY_S,
    DECISIONS_SHOWN,
    HOT,
    REFUSED_SHOWN,
    Json,
    last_of,
    mark,
    middle,
    moment,
    moves,
    predictions,
    quantile,
    said,
)
from proxy.telemetry.record import Migration, RequestRecord


def record(**fields: Any) -> RequestRecord:
    told: dict[str, Any] = {
        "request_id": "r",
        "t_proxy_recv": 10.0,
        "decode_instance": "d",
        "isl_tokens": 100,
    }
    return RequestRecord(**(told | fields))


def test_moves_are_counted_and_told_with_how_they_went() -> None:
    times = {"t_prefill_sent": 10.1, "t_prefill_done": 10.2, "t_decode_sent": 10.2}
    offload = {"prefill_instance": "p", "new_tokens": 90, "predicted_transfer_s": 0.5} | times
    moved = Migration("d", "e", "drain", "moved", 7, 0.25)
    found = moves(
        [
            record(**offload, t_first_token=10.7),
            record(**offload, fallback="p_error"),
            record(rehomed=True, home_instance="h", place="home_left"),
            record(migrations=[moved]),
            record(),
        ]
    )
    assert found["counts"] == {"offload": 2, "re-home": 1, "migration": 1}
    assert found["fell_back"] == 1
    assert [(row["from"], row["to"]) for row in found["last"]] == [
        *(("p", "d"), ("p", "d")),
        *(("h", "d"), ("d", "e")),
    ]
    assert [row["ended"] for row in found["last"]] == [
        "KV and first token in 0.50 s, predicted 0.50 s",
        "fell back: p_error",
        "home_left",
        "drain: moved, the client waited 0.25 s",
    ]


def test_refusals_displace_few_decisions() -> None:
    refused = [record(decode_instance=None, t_decided=float(at)) for at in range(99, 50, -1)]
    placed = [record(t_decided=at + 0.5) for at in range(60, 20, -1)]
    kept = sorted([*refused, *placed], key=moment, reverse=True)
    shown = last_of(kept)
    assert len(shown) == DECISIONS_SHOWN
    assert sum(one.decode_instance is None for one in shown) == REFUSED_SHOWN
    assert shown == sorted(shown, key=moment, reverse=True)
    assert last_of(refused) == refused[:REFUSED_SHOWN]
    assert last_of(placed) == placed[:DECISIONS_SHOWN]


def row(**fields: Any) -> Json:
    told = {"serves": True, "ongoing_tokens": 1_000, "prefill_tps": 1_000, "ttft_s": 1.0}
    return told | {"requests": 5} | fields


def marks(*rows: Json) -> list[list[str]]:
    mark(rows)
    return [one["marks"] for one in rows]


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({}, []),
        ({"ongoing_tokens": HOT * 1_000}, ["hot"]),
        ({"ttft_s": HOT}, ["slow"]),
        ({"ttft_s": HOT, "requests": 2}, []),
        ({"ttft_s": None, "requests": 0}, []),
        ({"prefill_tps": 400}, ["slow"]),
        ({"serves": False, "ongoing_tokens": 10_000}, []),
    ],
)
def test_who_stands_out_is_marked(odd: Json, told: list[str]) -> None:
    assert marks(row(), row(), row(**odd)) == [[], [], told]
    assert marks(row(**odd)) == [[]], "one alone stands out from nobody"


def test_idle_instances_are_neither_hot_nor_slow() -> None:
    idle = {"ongoing_tokens": 0, "ttft_s": None, "requests": 0}
    assert marks(row(**idle), row(**idle), row(**idle | {"ongoing_tokens": 500})) == [[], [], []]


def test_a_moment_has_its_date_once_it_is_a_day_ago() -> None:
    assert said(3_600.0, 7_200.0) == "01:00:00"
    assert said(0.0, DAY_S) == "1970-01-01 00:00"


def test_predictions_are_told_by_class() -> None:
    late = {"route_class": "WARM", "predicted_ttft_s": 0.5, "t_first_token": 11.0}
    (told,) = predictions([record(**late), record(route_class="WARM"), record()])
    assert told == {"route_class": "WARM", "requests": 1, "p10": 2.0, "p50": 2.0, "p90": 2.0}


def test_quantiles_leave_out_what_is_not_known() -> None:
    assert quantile([None, 3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([None], 0.5) is middle([None]) is None
    assert quantile([1.0], 1.0) == 1.0
