"""Bad input of every source ends in one line: option, value, allowed range, origin; no secrets."""

import pytest

from proxy.config.load import load
from proxy.config.sources import ConfigError, env_of, flag_of

NEEDED = ["--instances", "a:1"]


def write(folder, text):
    path = folder / "proxy.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def error_of(argv, environ=None):
    with pytest.raises(ConfigError) as caught:
        load(argv, environ or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


BAD_VALUES = [
    ("port", "70000", ">= 0, <= 65535"),
    ("port", "-1", ">= 0, <= 65535"),
    ("port", "http", "integer"),
    ("port", "80.5", "integer"),
    ("host", "a b", "text without spaces"),
    ("host", " ", "text without spaces"),
    ("model", "a b", "or none"),
    ("prefill_throughput", "0", ">= 0.001"),
    ("prefill_throughput", "fast", "number"),
    ("prefill_throughput", "inf", "number"),
    ("warm_threshold", "-1", ">= 0"),
    ("heavy_threshold", "8k", "integer"),
    ("heavy_threshold", "1__0", "integer"),
    ("kv_connector", "nccl", "one of mooncake, nixl, implicit, none"),
    ("placement", "random", "one of affinity, least-tokens, round-robin"),
    ("offload_policy", "seed", "seed-heuristic, seed-cost, threshold, never, always"),
    ("kv_transfer_time", "-0.1", ">= 0"),
    ("session_ttl", "0", "> 0"),
    ("max_sessions", "0", ">= 1"),
    ("prefix_cache_bytes", "1KiB", ">= 1MiB"),
    ("prefix_cache_bytes", "12 parsecs", "KiB, MiB, GiB"),
    ("prefix_cache_bytes", "20000000.0.0/8", "KiB, MiB, GiB"),
    ("max_body_bytes", "-5", ">= 1KiB"),
    ("active_decode_blocks_threshold", "1.01", ">= 0, <= 1"),
    ("active_decode_blocks_threshold", "nan", ">= 0, <= 1"),
    ("active_prefill_tokens_threshold", "1.5", "integer, >= 0"),
    ("active_prefill_tokens_threshold_frac", "inf", "number, >= 0"),
    ("max_num_batched_tokens", "0", ">= 1"),
    ("overload_status", "500", "one of 503, 529"),
    ("overload_status", "busy", "one of 503, 529"),
    ("connect_timeout", "0", "> 0"),
    ("idle_timeout", "nan", "> 0"),
    ("drain_seconds", "-1", ">= 0"),
    ("log_level", "trace", "one of debug, info, warning, error"),
    ("log_format", "xml", "one of text, json"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "value", "allowed"), BAD_VALUES)
@pytest.mark.parametrize("source", ["flag", "env", "file"])
def test_bad_value_names_option_value_range_and_origin(tmp_path, source, name, value, allowed):
    path = write(tmp_path, f"{name} = '{value}'\n" if source == "file" else "")
    argv = [*NEEDED, "--config", str(path)]
    environ = {env_of(name): value} if source == "env" else {}
    if source == "flag":
        argv.append(f"{flag_of(name)}={value}")
    origin = {"flag": f"flag {flag_of(name)}", "env": f"env {env_of(name)}", "file": f"file {path}"}
    message = error_of(argv, environ)
    assert message.startswith(f"{name} = {value!r} ({origin[source]})")
    assert allowed in message


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("port = true", "port = 'true'"),
        ("port = [1, 2]", "port = ['1', '2']"),
        ("response_headers = 7", "response_headers = '7'"),
        ("instances = []", "instances = []"),
        ("instances = [5]", "'5' is not host:port"),
        ("[port]\nnumber = 1", "port (file "),
        ("[api_key]\nacme = 'sk-1'", "a table, but options are single values"),
        ("prot = 1", "unknown key 'prot' in file"),
        ("warm-threshold = 1", "did you mean warm_threshold?"),
        ("config = 'x'", "unknown key 'config'"),
        ("host = 'a'\nport = = 1", "at line 2"),
        (b"host = '\xff'", "not valid TOML"),
    ],
)
def test_bad_file(tmp_path, line, part):
    path = write(tmp_path, line)
    environ = {} if b"instances" in path.read_bytes() else {"CACHE_PROXY_INSTANCES": "a:1"}
    message = error_of(["--config", str(path)], environ)
    assert part in message
    assert str(path) in message


def test_missing_file_and_folder_as_file(tmp_path):
    absent = error_of(["--config", "absent.toml"])
    assert (
        absent
        == "config = 'absent.toml' (flag --config): cannot read it: No such file or directory"
    )
    assert "env CACHE_PROXY_CONFIG" in error_of([], {"CACHE_PROXY_CONFIG": str(tmp_path)})
    assert "config = 'a\\x00b'" in error_of(["--config", "a\0b"])


@pytest.mark.parametrize(
    ("argv", "environ", "part"),
    [
        (["--prot", "1"], {}, "unknown argument '--prot'; did you mean --port?"),
        (["8000"], {}, "unknown argument '8000'; it follows no option: a value is one word"),
        (["--por", "1"], {}, "unknown argument '--por'"),  # no abbreviations: they break later
        (["--port"], {}, "--port: expected one argument"),
        ([], {"CACHE_PROXY_PROT": "1"}, "CACHE_PROXY_PROT; did you mean CACHE_PROXY_PORT?"),
        ([], {}, "instances is not given: use --instances 127.0.0.1:8001,127.0.0.1:8002"),
        ([], {"CACHE_PROXY_INSTANCES": ""}, "instances is not given"),
    ],
)
def test_bad_use(argv, environ, part):
    assert part in error_of(argv, environ)


def test_what_is_like_nothing_is_likened_to_nothing():
    assert error_of(["--nope", "1"]) == "unknown argument '--nope'"
    variable = "CACHE_PROXY_NOPE"
    assert error_of([], {variable: "1"}) == f"unknown environment variable {variable}"


def test_order_of_thresholds_names_both_with_their_origins():
    message = error_of([*NEEDED, "--warm-threshold", "9000"])
    assert message == (
        "warm_threshold = '9000' (flag --warm-threshold) must not be larger than "
        "heavy_threshold = 8192 (default)"
    )
    assert load([*NEEDED, "--warm-threshold=8192"], {}).settings.warm_threshold == 8192


def test_secrets_in_bad_input_are_not_echoed():
    assert "hunter2" not in error_of(["--instances", "http://me:hunter2@h:1"])
    assert "hunter2" not in error_of(["--instances", "me:hunter2@h:1"])
    assert "hunter2" not in error_of(["--instances", f"http://me:hunter2{'x' * 99}@h:1"])
    assert "hunter2" not in error_of([*NEEDED, "--password=hunter2"])
    assert "hunter2" not in error_of(NEEDED, {"CACHE_PROXY_PASSWORD": "hunter2"})


def test_long_values_are_cut():
    assert len(error_of([*NEEDED, "--port", "9" * 5000])) < 300
