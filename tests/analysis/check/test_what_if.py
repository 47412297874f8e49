"""What-if on runs made in virtual time: the policy that ran is reproduced, the other foreseen."""

from dataclasses import replace

import pytest

from analysis.check import what_if
from analysis.check.fit import NAMES, Fit
from analysis.check.logged import LoggedLoad, LoggedRequest, read_load
from analysis.check.logs import CheckSample
from analysis.check.what_if import Fleet, WhatIf, compare, fitted, lateness, size_of
from analysis.runs import RunError
from replayer.engine.types import EngineOptions
from replayer.virtual.recorded import router_config
from tests.support.checked_runs import FITTED_BLOCK_TOKENS, PROXY, SLOW
from tests.support.logged import line, write_log, write_options
from tests.support.recorded import PROXY as RAN
from tests.support.recorded import write_run
from tests.support.traces import sample_in_blocks_of

OPTIONS = router_config(RAN)
KNOWN = Fit(SLOW, frozenset(NAMES), {}, 0)


def load_of(folder, policy: str, limit: int = 80, engines: int = 2) -> LoggedLoad:
    folder.mkdir()
    trace = sample_in_blocks_of(FITTED_BLOCK_TOKENS, folder)
    write_run(folder, SLOW, PROXY, engines, limit, trace=trace, offload_policy=policy)
    return read_load(folder / "proxy.jsonl", None, None, 1000)


def asked(load: LoggedLoad, policy: str, instances: int = 2, engine: Fit = KNOWN) -> WhatIf:
    size, ran = size_of(load, None), Fleet(load.policy, len(load.names), OPTIONS)
    other = Fleet(policy, instances, OPTIONS)
    return compare(load, ran, other, (engine, size), lambda *_: None)


@pytest.mark.figures
def test_the_policy_that_ran_is_reproduced_by_engines_that_are_fitted(tmp_path):
    load = load_of(tmp_path / "run", "cost", limit=60)
    found = asked(load, "cost", engine=fitted(load, size_of(load, None)))
    assert found.trusted
    assert found.figures[0].name == "ttft_s p50"
    assert [one.change for one in found.figures] == [0.0] * len(found.figures)


def test_another_policy_is_foreseen(tmp_path):
    """A run under that policy has the TTFT that was foreseen of it, by the log of the first."""
    load = load_of(tmp_path / "ran", "always")
    found = asked(load, "never")
    assert found.trusted
    truth = load_of(tmp_path / "truth", "never")
    real = sorted(one.ttft_s for one in truth.requests if one.ttft_s is not None)
    p50, p90 = found.figures[:2]
    assert p50.other == pytest.approx(real[len(real) // 2], rel=0.15)
    assert p90.other == pytest.approx(real[int(len(real) * 0.9)], rel=0.15)
    assert found.offloads[0] > 0
    assert found.offloads[2] == 0


def test_more_instances_are_foreseen_too(tmp_path):
    found = asked(load_of(tmp_path / "ran", "never", engines=1), "never", instances=3)
    ttft = found.figures[1]
    assert (found.ran.instances, found.asked.instances) == (1, 3)
    assert found.trusted
    assert ttft.other < ttft.ran
    assert ttft.high < 0.0


def test_options_are_those_of_a_file(tmp_path):
    path = write_options(tmp_path / "a.toml", RAN | {"port": 8000, "shadow_policy": "cost"})
    fleet = Fleet.of("cost", 2, path)
    assert fleet == Fleet("cost", 2, OPTIONS, "a.toml")
    assert Fleet.of("cost", 2, write_options(path, {})).options.prefill_throughput == 20_000
    for options, text in (
        ({"heavy_threshold": "many"}, "heavy_threshold: must not be 'many'"),
        ({"kv_connector": "mine"}, r"must be the proxy's options \('mine'\)"),
        ({"prefill_throughput": 0}, "must be the proxy's options"),
        ({"active_decode_blocks_threshold": "x"}, "active_decode_blocks_threshold: must not be"),
    ):
        with pytest.raises(RunError, match=text):
            Fleet.of("cost", 2, write_options(path, options))
    path.write_text("=")
    with pytest.raises(RunError, match="must be TOML"):
        Fleet.of("cost", 2, path)
    with pytest.raises(RunError, match="cannot be read"):
        Fleet.of("cost", 2, tmp_path / "nix")


def test_a_leg_of_other_hits_is_not_fitted_to(tmp_path, monkeypatch):
    """The engine had evicted what the model still has: that leg's time is no measure."""
    lines = [
        line("s", 0, 0.0),
        line("s", 1, 3.0, prompt=1700, cached=0, hit=0, reachable=1600),
        line("t", 0, 9.0),
    ]
    load = read_load(write_log(tmp_path / "log", lines), None, None, 10)
    given: list[CheckSample] = []

    def taken(samples: list[CheckSample], _: object) -> Fit:
        given.extend(samples)
        return KNOWN

    monkeypatch.setattr(what_if, "fit", taken)
    fitted(load, size_of(load, None))
    assert [one.first_s is None for one in given] == [False, True, False]


def test_what_the_model_does_not_have_is_a_delay(tmp_path):
    load = load_of(tmp_path / "ran", "never")
    size = size_of(load, None)
    assert lateness(load, KNOWN, size).mean_s < 0.002
    late = replace(load, requests=tuple(map(later, load.requests)))
    assert lateness(late, KNOWN, size).mean_s == pytest.approx(0.05, abs=0.005)


def later(one: LoggedRequest) -> LoggedRequest:
    """The same request, whose first token came 50 ms later."""
    return replace(one, record={**one.record, "t_first_token": one.record["t_first_token"] + 0.05})


def test_an_engine_has_room_for_the_longest_request(tmp_path):
    path = write_log(tmp_path / "log", [line("s", 0, 0.0, prompt=800_000)])
    load = read_load(path, None, None, 10)
    preset = EngineOptions()
    assert size_of(load, None).max_model_len > 1_600_000 > preset.num_blocks * preset.block_size
    assert size_of(load, 1_000_000).max_model_len <= 1_000_000
    with pytest.raises(RunError, match=r"--kv-tokens: must be 80.,... at least"):
        size_of(load, 1000)
