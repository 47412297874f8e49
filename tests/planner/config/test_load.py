"""Options of the planner: from files, inline JSON and flags, and what is wrong in a line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from planner.config.load import Loaded, declare, load
from proxy.config.sources import ConfigError


def loaded(*words: str) -> Loaded:
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    declare(parser)
    return load(vars(parser.parse_args(words)))


def test_flags_are_over_the_file_which_is_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('proxies = ["a:1", "http://b:2/"]\nttft_ms = 700\nitl_ms = 20\n')
    options = loaded(str(path), "--itl-ms", "30", "--no-enable-load-scaling").options
    assert options.proxies == ("http://a:1", "http://b:2")
    assert (options.ttft_ms, options.itl_ms, options.advisory) == (700.0, 30.0, True)
    assert options.rules.slo.ttft_s == 0.7
    assert not options.rules.load_scaling


def test_a_payload_of_dynamo_loads_and_names_what_it_cannot_use() -> None:
    found = loaded(
        '{"proxies": "p:1", "ttft": 400, "itl": 25, "throughput_adjustment_interval": 60,'
        ' "load_predictor": "constant", "environment": "kubernetes", "prophet_window_size": 20,'
        ' "scheduling": {"tick_max_duration_seconds": 9}, "mode": "agg"}'
    )
    options = found.options
    assert (options.ttft_ms, options.itl_ms) == (400.0, 25.0)
    assert options.throughput_adjustment_interval_seconds == 60.0
    assert options.tick_max_duration_seconds == 9.0
    assert found.warnings == (
        "keys without a meaning here: environment, prophet_window_size",
        "load_predictor: the strategy reserve asks none; founding does",
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"proxies": "p:1", "ttft_sm": 4}', "unknown key 'ttft_sm' .* did you mean ttft_ms"),
        ('{"proxies": "p:1", "ttft_ms": 0}', "ttft_ms = '0' .* allowed: number, > 0"),
        ('{"proxies": "p:1", "ttft_ms": "soon"}', "ttft_ms = 'soon'"),
        ('{"proxies": "p:1", "ttft_ms": NaN}', "not valid JSON"),
        ('{"proxies": ""}', "an address is empty"),
        ('{"proxies": []}', "proxies = .* allowed"),
        ("{}", "proxies: it is not given"),
        ('{"proxies": "p:1", "mode": "disagg"}', "mode = 'disagg' .* allowed: one of agg"),
        ('{"proxies": "p:1", "max_gpu_budget": 2, "min_endpoint": 3}', "need 3 at least"),
        ('{"proxies": "p:1", "max_gpu_budget": 0}', "need 1 at least"),
        ('{"proxies": "p:1", "load_adjustment_interval_seconds": 7}', "has to divide"),
        (
            '{"proxies": "p:1", "enable_load_scaling": false, "enable_throughput_scaling": false}',
            "one of the two loops has to be on",
        ),
        ('{"proxies": "p:1", "optimization_target": "load"}', "up_kv_rate: .* needs it|needs it"),
        (
            '{"proxies": "p:1", "optimization_target": "load", "decode_scale_up_kv_rate": 50,'
            ' "decode_scale_down_kv_rate": 50}',
            "below the one for up",
        ),
        (
            '{"proxies": "p:1", "optimization_target": "latency", "enable_load_scaling": false}',
            "latency is load scaling alone",
        ),
        ('{"proxies": "p:1", "scaler": "exec"}', "the scaler exec needs it"),
        ('{"proxies": "p:1", "scaler": "file"}', "the scaler file needs it"),
        ('{"proxies": "p:1,http://p:1/"}', "an address is given twice"),
        ('{"proxies": "ftp://p:1"}', r"not of the form \[http://\]host:port"),
        ('{"proxies": "p:99999"}', "Port out of range"),
        ('{"proxies": "http://:1"}', r"not of the form \[http://\]host:port"),
        *(
            (
                f'{{"proxies": "p:1", "scaler": "exec", "scaler_command": "x", "match": "{glob}"}}',
                "match = .*the scaler exec makes names of it",
            )
            for glob in ("gpu-0", "gpu-?", "gpu-[0-9]", "a*b*", "gpu/*", "-*", "g\u00fc*")
        ),
        ('{"proxies": "p:1", "control": "0.0.0.0:1"}', "is not loopback, so it is needed"),
        ('{"proxies": "p:1", "control": "here"}', "not of the form HOST:PORT"),
        ('{"proxies": "p:1", "plan": {"a": 1}}', "a table"),
        ("[1]", "cannot read it"),
        ("nowhere.toml", "file nowhere.toml: cannot read it: No such file"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        loaded(text)
    assert "\n" not in str(caught.value)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    secret = "s3cret of \u00fc"
    with pytest.raises(ConfigError) as caught:
        loaded("--proxies", "p:1", "--proxy-token", secret)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        loaded("--proxies", "http://user:s3cret@h:1 x")
    assert "s3cret" not in str(caught.value)
    (tmp_path / "token").write_text("a-long-enough-token\n")
    options = loaded("--proxies", "p:1", "--proxy-token", f"@{tmp_path}/token").options
    assert options.proxy_token is not None
    assert options.proxy_token.get_secret_value() == "a-long-enough-token"


def test_broken_toml_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("proxies = [\n")
    with pytest.raises(ConfigError, match="not valid TOML") as caught:
        loaded(str(path))
    assert "\n" not in str(caught.value)


def test_a_rule_that_may_swing_is_warned_of() -> None:
    (warning,) = loaded("--proxies", "p:1", "--scale-down-rule", "sensitivity").warnings
    assert "for ever" in warning


def test_a_target_of_use_is_load_scaling_without_a_prediction() -> None:
    found = loaded("--proxies", "p:1", "--optimization-target", "latency")
    assert not found.options.rules.throughput_scaling
    assert "no effect" in found.warnings[0]
    words = ("load", "--decode-scale-up-kv-rate", "80", "--decode-scale-down-kv-rate", "20")
    rules = loaded("--proxies", "p:1", "--optimization-target", *words).options.rules
    assert (rules.own.up, rules.own.down) == (0.8, 0.2)


def test_a_predictor_that_nobody_asks_is_a_warning() -> None:
    (warning,) = loaded("--proxies", "p:1", "--load-predictor", "ensemble").warnings
    assert "asks none" in warning
    asked = ("--proxies", "p:1", "--load-predictor", "ensemble", "--strategy", "founding")
    assert loaded(*asked).warnings == ()
