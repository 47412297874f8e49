"""Made-up runs for tests of the reports."""

from analysis.report.summary import summarise

FACTS = {"trace": "t.jsonl", "target": "http://x", "mode": "open", "speedup": 1.0, "planned": 4}


def row(name, **fields):
    return {
        "request_id": name,
        "sent_as": f"{name}.run",
        "outcome": "ok",
        "intended_s": 0.0,
        "sent_s": 0.0,
        "first_token_s": 1.0,
        "end_s": 3.0,
        "input_length": 100,
        "output_length": 3,
        "prompt_tokens": 100,
        "completion_tokens": 3,
        "cached_tokens": 40,
        "ideal_hit_tokens": 50,
        "output_digest": f"digest of {name}",
        "route_class": "WARM",
    } | fields


def failed(name, outcome="timeout", **fields):
    return row(name, outcome=outcome, first_token_s=None, output_digest=None) | fields


def placed(name, route_class="WARM", **fields):
    """A row that was joined with the proxy's record."""
    is_moved = route_class == "HEAVY_P2P"
    legs = {"prefill_leg": 0.5, "transfer": 0.25} if is_moved else {"first_token": 0.75}
    return (
        row(
            name,
            route_class=route_class,
            prefill_instance="p" if is_moved else None,
            decode_instance="d",
            proxy_ttft_s=1.0,
            predicted_ttft_s=0.5,
            predicted_prefill_s=0.5,
            predicted_transfer_s=0.5 if is_moved else None,
            phases_s={"decide": 0.25, **legs, "stream": 2.0},
        )
        | fields
    )


def skipped(name):
    return {"request_id": name, "outcome": "skipped", "intended_s": None, "input_length": 100}


def run(*rows, **facts):
    return summarise(FACTS | facts, rows)
