"""The simulator's self-check, on runs made in virtual time with constants that are known."""

import orjson
import pytest

from analysis.check.check import (
    Check,
    Compared,
    FittedModel,
    as_placed,
    check_run,
    engine_sizes,
    instance_names,
    ks_distance,
    predict,
)
from analysis.check.fit import Constants, Fit, line
from analysis.check.logs import Overhead, read_run_log, samples_of
from analysis.cli import main
from replayer.engine.costs import IntakeCost
from replayer.virtual.recorded import read_recorded
from tests.support.recorded import TRACE, read_lines, write_lines, write_run

SLOW = Constants(
    a0=12e-3, a1=70e-6, a2=2e-4, a3=9e-8, a4=4e-10, x0=0.05, x1=1e-5,
    intake=4e-3, intake_per_token=4e-7,
)  # fmt: skip
FAST = Constants(
    a0=5e-3, a1=30e-6, a2=4e-5, a3=2e-8, a4=1.2e-9, x0=0.02, x1=4e-6,
    intake=2e-3, intake_per_token=1e-6,
)  # fmt: skip
PROXY = IntakeCost(3e-3, 2e-7)


def chunk_s(constants: Constants) -> float:
    """A step of 8,192 prefill tokens after 16,384, beside four streams."""
    pairs = 8_192 * (16_384 + 4_096)
    own = constants
    return own.a0 + own.a1 * 8_192 + own.a2 * 4 + own.a3 * 80_000 + own.a4 * pairs


def moving_s(constants: Constants) -> float:
    return constants.x0 + constants.x1 * 8_000


def assert_recovered(check: Check, constants: Constants) -> None:
    found = check.fitted.constants
    assert found.a0 == pytest.approx(constants.a0, rel=0.02)
    assert found.a1 == pytest.approx(constants.a1, rel=0.15)
    assert found.a3 == pytest.approx(constants.a3, rel=0.1)
    # Some constants move the same times: what they say together is sharper than each alone.
    assert chunk_s(found) == pytest.approx(chunk_s(constants), rel=0.03)
    assert check.proxy.fixed_s == pytest.approx(PROXY.fixed_s, rel=0.01)
    assert check.proxy.per_token_s == pytest.approx(PROXY.per_token_s, rel=0.01)


def ratios(check: Check) -> dict[str, float]:
    return {one.name: one.ratio for one in (*check.times, *check.counts) if one.ratio is not None}


def test_known_constants_are_recovered_from_a_run_with_transfers(tmp_path):
    write_run(tmp_path, SLOW, PROXY, limit=30, offload_policy="seed-heuristic")
    check = check_run(tmp_path)
    assert_recovered(check, SLOW)
    assert moving_s(check.fitted.constants) == pytest.approx(moving_s(SLOW), rel=0.3)
    assert all(one.within(0.1) for one in check.as_placed)
    assert check.ks_as_placed < 0.1


def test_fitted_constants_predict_a_run_of_the_cost_policy(tmp_path):
    write_run(tmp_path, FAST, PROXY, scale=6.0, limit=30, offload_policy="cost")
    check = check_run(tmp_path)
    assert_recovered(check, FAST)
    found = ratios(check)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.1)
    assert check.within(0.1)
    assert check.ks_ratio < 0.1
    assert all(one.low <= one.predicted <= one.high for one in check.times)


@pytest.mark.parametrize("policy", ["always", "seed-heuristic", "cost"])
def test_with_the_true_constants_the_prediction_is_the_run(tmp_path, policy):
    write_run(tmp_path, SLOW, PROXY, scale=6.0, offload_policy=policy)
    recorded = read_recorded(tmp_path)
    log = read_run_log(tmp_path, recorded)
    own = SLOW.scaled(1 / 6.0)
    engines = [own.engine(one) for one in engine_sizes(recorded)]
    proxy = IntakeCost(PROXY.fixed_s / 6.0, PROXY.per_token_s / 6.0)
    run = predict(recorded, log, engines, proxy)
    waited_s = [row["first_token_s"] - row["sent_s"] for row in log.client.values()]
    assert [row.ttft_s for row in run.rows] == pytest.approx(waited_s, rel=1e-9)
    model = FittedModel(Fit(own, frozenset(), {}, 0), proxy, engines)
    placed_s = as_placed(samples_of(recorded, log, instance_names(recorded)), model)
    # Times of the log are unix seconds, a quarter of a microsecond apart: a step's end may be
    # missed by that, which costs a whole step.
    off = [abs(a - b) for a, b in zip(placed_s, waited_s, strict=True)]
    assert sum(one > 1e-5 for one in off) < len(off) / 10


def test_a_disturbed_log_still_gives_the_constants(tmp_path):
    write_run(tmp_path, SLOW, PROXY, limit=30)
    log = read_lines(tmp_path / "proxy.jsonl")
    for row in log[::12]:
        row["t_first_token"] += 2.0 * (row["t_first_token"] - row["t_decode_sent"])
        row["t_done"] += 2.0 * (row["t_done"] - row["t_decode_sent"])
    write_lines(tmp_path / "proxy.jsonl", log)
    found = check_run(tmp_path).fitted.constants
    assert found.a0 == pytest.approx(SLOW.a0, rel=0.05)
    assert chunk_s(found) == pytest.approx(chunk_s(SLOW), rel=0.05)


def test_what_a_run_never_did_is_as_the_simulator_has_it(tmp_path):
    write_run(tmp_path, SLOW, PROXY, limit=30, offload_policy="never")
    check = check_run(tmp_path)
    assert {"x0", "x1"}.isdisjoint(check.fitted.seen)
    assert check.fitted.constants.x0 == check.true.x0
    assert {"a0", "a1", "a3"} <= check.fitted.seen


def test_the_command_tells_by_its_status(tmp_path, capsys):
    write_run(tmp_path, SLOW, PROXY, limit=16)
    out = tmp_path / "out" / "check.json"
    assert main(["check", str(tmp_path), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "TTFT p90" in printed
    assert "ok     realised TTFT within 15% of the prediction" in printed
    document = orjson.loads(out.read_bytes())
    assert document["within"] is True
    assert [one["name"] for one in document["times"]][:2] == ["ttft_s p50", "ttft_s p90"]
    rows = read_lines(tmp_path / "requests.jsonl")
    for row in rows[::3]:
        row["first_token_s"] += 5.0
    for row in rows:
        row["intended_s"] = row["sent_s"] - 0.25
    write_lines(tmp_path / "requests.jsonl", rows)
    assert main(["check", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED realised TTFT" in printed
    assert "schedule lag of the run: p50 250.0 ms, p99 250.0 ms, max 250.0 ms" in printed


def test_within_is_relative_to_the_prediction():
    assert Compared("ttft_s p50", 1.15, 1.0, 1.0, 1.0).within(0.15)
    assert not Compared("ttft_s p50", 1.0, 1.2, 1.2, 1.2).within(0.15)
    assert Compared("offloads", 0, 3, 2, 4).ratio is None


def test_ks_distance():
    assert ks_distance([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert ks_distance([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert ks_distance([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.5, 9.0]) == 0.25


def test_a_line_through_overheads_is_not_moved_by_a_few():
    points = [Overhead(n * 1_000, 0.004 + n * 2e-3) for n in range(1, 30)]
    outliers = [Overhead(5_000, 3.0), Overhead(20_000, 2.0)]
    assert line([*points, *outliers]) == pytest.approx((0.004, 2e-6), rel=1e-2)
    assert line([Overhead(1_000, 0.01)] * 3) == pytest.approx((0.01, 0.0))


def test_a_recorded_run_keeps_its_schedule_and_options(tmp_path):
    write_run(tmp_path, SLOW, PROXY, limit=20, scale=6.0)
    recorded = read_recorded(tmp_path)
    config = recorded.config()
    assert config.kv_transfer_time_s == 0.1
    assert config.prefix_cache_bytes == 256 << 20
    assert config.shadow_policy is None
    assert recorded.rules.speedup == 12.0
    assert recorded.time_scale == 6.0


def edit(path, change):
    record = orjson.loads(path.read_bytes())
    change(record)
    path.write_bytes(orjson.dumps(record))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("engines"), "must be as the demo writes it"),
        (lambda r: r.update(engines=[]), "engines: must not be empty"),
        (lambda r: r.update(engines=[{"sped": 1}]), "must be as the demo writes it"),
        (lambda r: r.update(replay=["--nonsense"]), "must be arguments of replay"),
        (lambda r: r.update(replay=[str(TRACE), "--mode", "sessions"]), "must be --mode open"),
        (lambda r: r["proxy"].pop("scrape_interval"), "must have numbers for scrape_interval"),
        (lambda r: r["proxy"].pop("prefill_throughput"), "must be the proxy's options"),
        (lambda r: r["proxy"].update(instances=["a=b"]), "1 instances for 2 engines"),
        (lambda r: r.update(replay=[str(TRACE), "--limit", "5"]), "not of one run"),
    ],
)
def test_a_bad_record_is_one_line(tmp_path, capsys, change, words):
    write_run(tmp_path, SLOW, PROXY, limit=20)
    edit(tmp_path / "run.json", change)
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("requests.jsonl", lambda row: row.update(outcome="timeout"), "1 of 20 requests are not"),
        ("proxy.jsonl", lambda row: row.update(t_done=None), "1 of 20 requests are not in it"),
        ("proxy.jsonl", lambda row: row.pop("fallback"), "1 of 20 requests are not in it"),
        ("proxy.jsonl", lambda row: row.update(decode_instance="x"), "run.json does not know"),
    ],
)
def test_a_bad_log_is_one_line(tmp_path, capsys, name, change, words):
    write_run(tmp_path, SLOW, PROXY, limit=20)
    rows = read_lines(tmp_path / name)
    change(rows[3])
    write_lines(tmp_path / name, rows)
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["run.json", "requests.jsonl", "proxy.jsonl"])
def test_a_missing_file_is_one_line(tmp_path, capsys, name):
    write_run(tmp_path, SLOW, PROXY, limit=20)
    (tmp_path / name).unlink()
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("text", ["0", "x", "nan"])
def test_a_bad_bound_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["check", "x", "--within", text])
    assert "must be a ratio" in capsys.readouterr().err
