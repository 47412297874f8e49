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


def skipped(name):
    return {"request_id": name, "outcome": "skipped", "intended_s": None, "input_length": 100}


def run(*rows, **facts):
    return summarise(FACTS | facts, rows)
