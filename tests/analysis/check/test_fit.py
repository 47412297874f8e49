"""Engine constants fitted to a log of a run whose constants are known."""

import pytest

from analysis.check.check import (
    check_run,
)
from analysis.check.fit import Constants, line
from analysis.check.logs import Overhead
from tests.support.checked_runs import SLOW, assert_recovered, chunk_s, write_run_to_fit
from tests.support.recorded import read_lines, write_lines

pytestmark = pytest.mark.figures


def moving_s(constants: Constants) -> float:
    return constants.x0 + constants.x1 * 8_000


def test_known_constants_are_recovered_from_a_run_with_transfers(tmp_path):
    write_run_to_fit(tmp_path, SLOW, limit=30, offload_policy="seed-heuristic")
    check = check_run(tmp_path)
    assert_recovered(check, SLOW)
    assert moving_s(check.fitted.constants) == pytest.approx(moving_s(SLOW), rel=0.3)
    assert all(one.within(0.1) for one in check.as_placed)
    assert check.ks_as_placed < 0.1


def test_a_disturbed_log_still_gives_the_constants(tmp_path):
    write_run_to_fit(tmp_path, SLOW, limit=16)
    log = read_lines(tmp_path / "proxy.jsonl")
    for row in log[::12]:
        row["t_first_token"] += 2.0 * (row["t_first_token"] - row["t_decode_sent"])
        row["t_done"] += 2.0 * (row["t_done"] - row["t_decode_sent"])
    write_lines(tmp_path / "proxy.jsonl", log)
    found = check_run(tmp_path).fitted.constants
    assert found.a0 == pytest.approx(SLOW.a0, rel=0.05)
    assert chunk_s(found) == pytest.approx(chunk_s(SLOW), rel=0.05)


def test_what_a_run_never_did_is_as_the_simulator_has_it(tmp_path):
    write_run_to_fit(tmp_path, SLOW, limit=16, offload_policy="never")
    check = check_run(tmp_path)
    assert {"x0", "x1"}.isdisjoint(check.fitted.seen)
    assert check.fitted.constants.x0 == check.true.x0
    assert {"a0", "a1", "a3"} <= check.fitted.seen


def test_a_line_through_overheads_is_not_moved_by_a_few():
    points = [Overhead(n * 1_000, 0.004 + n * 2e-3) for n in range(1, 30)]
    outliers = [Overhead(5_000, 3.0), Overhead(20_000, 2.0)]
    assert line([*points, *outliers]) == pytest.approx((0.004, 2e-6), rel=1e-2)
    assert line([Overhead(1_000, 0.01)] * 3) == pytest.approx((0.01, 0.0))
