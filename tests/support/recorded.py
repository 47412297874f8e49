"""A run in virtual time, written down as the demo writes one down: a log with known constants."""

from pathlib import Path
from typing import Any

import orjson

from analysis.check.check import engine_sizes
from analysis.check.fit import Constants
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from replayer.engine.costs import IntakeCost
from replayer.virtual.fleet import simulate
from replayer.virtual.recorded import Seen, read_recorded
from replayer.virtual.requests import VirtualOptions
from tests.support.traces import SAMPLE

PROXY = {
    "prefill_throughput": 20_000,
    "offload_policy": "always",
    "heavy_threshold": 4_000,
    "kv_transfer_time": 0.1,
    "prefix_cache_bytes": "256MiB",
    "shadow_policy": "none",
    "prefill_timeout": 120,
    "transfer_timeout": 30,
    "ttft_timeout": 300,
    "scrape_interval": 2,
}
UNIX_S = 1_700_000_000.0


class Legs:
    """When P's legs were sent and done, by session and prompt."""

    def __init__(self) -> None:
        self.times_s: dict[tuple[Any, int], tuple[float, float]] = {}

    def on_prefill_done(self, route, facts, prefill_s, cached_tokens, now_s):
        self.times_s[facts.session_id, facts.prompt_tokens] = now_s - prefill_s, now_s


def write_run(
    folder: Path,
    constants: Constants,
    proxy: IntakeCost,
    engines: int = 2,
    limit: int = 60,
    scale: float = 1.0,
    trace: Path = SAMPLE,
    **options: Any,
) -> None:
    """`constants` in engine seconds; the log's clock runs `scale` times slower than theirs."""
    folder.mkdir(exist_ok=True)
    names = [f"engine{at}" for at in range(engines)]
    load = [str(trace), "--limit", str(limit), "--speedup", str(2 * scale)]
    instances = [f"{name}=http://127.0.0.1:1" for name in names]
    record = {
        "engines": [{"speed": scale}] * engines,
        "proxy": PROXY | {"instances": instances} | options,
        "replay": [*load, "--time-scale", str(scale)],
    }
    (folder / "run.json").write_bytes(orjson.dumps(record))
    recorded = read_recorded(folder)
    tokens = {one.request_id: one.input_tokens or 1 for one in recorded.requests}
    seen = {name: Seen(count, count) for name, count in tokens.items()}
    own = constants.scaled(1 / scale)
    fleet = tuple(own.engine(one) for one in engine_sizes(recorded))
    before = IntakeCost(proxy.fixed_s / scale, proxy.per_token_s / scale)
    virtual = VirtualOptions(engines=fleet, block_tokens=recorded.block_tokens, proxy=before)
    legs = Legs()
    run = simulate(recorded.planned(seen), Router(FleetState(recorded.config())), virtual, [legs])
    client, log = [], []
    turns: dict[str, int] = {}
    for row, request in zip(run.rows, recorded.requests, strict=True):
        assert row.ttft_s is not None
        assert row.end_s is not None
        decided_s = row.arrival_s + before.delay_s(row.prompt_tokens)
        sent_s = done_s = None
        if row.prefill is not None:
            sent_s, done_s = legs.times_s[row.session_id, row.prompt_tokens]
        client.append(
            {
                "request_id": request.request_id,
                "sent_as": f"{request.request_id}.run",
                "outcome": "ok",
                "sent_s": row.arrival_s,
                "first_token_s": row.arrival_s + row.ttft_s,
                "last_token_s": row.end_s,
                "end_s": row.end_s,
                "completion_tokens": row.output_tokens,
            }
        )
        log.append(
            {
                "request_id": f"{request.request_id}.run",
                "session_id": row.session_id,
                "turn": turns.setdefault(row.session_id, 0),
                "model": "sim",
                "policy": str(recorded.proxy["offload_policy"]),
                "outcome": "ok",
                "hit_tokens": round(row.prompt_tokens * row.estimated_hit_ratio),
                "reachable_hit_tokens": max(0, row.prompt_tokens - row.new_tokens),
                "candidates": [{"instance": name, "prefill": None} for name in names],
                "t_queued": None,
                "t_decided": UNIX_S + decided_s,
                "route_class": row.route_class,
                "prefill_instance": row.prefill and row.prefill.replace("e", "engine"),
                "decode_instance": row.decode.replace("e", "engine"),
                "isl_tokens": row.prompt_tokens,
                "prompt_tokens": row.prompt_tokens,
                "cached_tokens": row.cached_tokens + row.external_tokens,
                "osl_tokens": row.output_tokens,
                "t_proxy_recv": UNIX_S + row.arrival_s,
                "t_prefill_sent": sent_s and UNIX_S + sent_s,
                "t_prefill_done": done_s and UNIX_S + done_s,
                "t_decode_sent": UNIX_S + (done_s or decided_s),
                "t_first_token": UNIX_S + row.arrival_s + row.ttft_s,
                "t_done": UNIX_S + row.end_s,
                "retries": 0,
                "fallback": row.fallback,
            }
        )
        turns[row.session_id] += 1
    write_lines(folder / "requests.jsonl", client)
    write_lines(folder / "proxy.jsonl", sorted(log, key=lambda row: row["t_done"]))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]
