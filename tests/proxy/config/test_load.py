"""The configuration: precedence, origins, and that every printed form reads back."""

import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.load import Loaded, default_toml, load, print_config
from proxy.config.options import Settings
from proxy.config.values import ByteSize, InstanceSpec
from tests.support.options import NEEDED


def write(folder, text):
    path = folder / "proxy.toml"
    path.write_bytes(text.encode())
    return path


def test_instances_are_a_list_in_toml_and_comma_separated_elsewhere(tmp_path):
    path = write(tmp_path, "instances = ['a:1', 'b=b:2']")
    from_file = load(["--config", str(path)], {}).settings.instances
    assert from_file == load(["--instances", "a:1,b=b:2"], {}).settings.instances
    assert from_file == load([], {"CACHE_PROXY_INSTANCES": "a:1, b=b:2"}).settings.instances
    assert from_file == Settings(instances=from_file).instances


def test_flag_over_env_over_file_over_default(tmp_path):
    path = write(tmp_path, "port = 3\nmodel = 'file'\nlog_level = 'debug'\n")
    argv = [*NEEDED, "--config", str(path), "--port", "1"]
    environ = {"CACHE_PROXY_PORT": "2", "CACHE_PROXY_MODEL": "env", "PATH": "/bin"}
    loaded = load(argv, environ)
    shown = {
        name: (getattr(loaded.settings, name), loaded.origins[name]) for name in loaded.origins
    }
    assert shown["port"] == (1, "flag --port")
    assert shown["model"] == ("env", "env CACHE_PROXY_MODEL")
    assert shown["log_level"] == ("debug", f"file {path}")
    assert shown["host"] == ("0.0.0.0", "default")
    assert shown["config"] == (path, "flag --config")
    assert set(loaded.origins) == set(Settings.model_fields)


def test_file_may_be_named_by_env_and_left_out_by_flag(tmp_path):
    path = write(tmp_path, "port = 3")
    environ = {"CACHE_PROXY_CONFIG": str(path)}
    assert load(NEEDED, environ).origins["port"] == f"file {path}"
    assert load([*NEEDED, "--config", "none"], environ).origins["port"] == "default"


def test_none_unsets_what_a_file_sets(tmp_path):
    path = write(tmp_path, "active_decode_blocks_threshold = 0.85")
    argv = [*NEEDED, "--config", str(path)]
    assert load(argv, {}).settings.active_decode_blocks_threshold == 0.85
    loaded = load([*argv, "--active-decode-blocks-threshold", "none"], {})
    assert loaded.settings.active_decode_blocks_threshold is None
    assert loaded.origins["active_decode_blocks_threshold"].startswith("flag")
    assert load([*NEEDED, "--kv-connector", "none"], {}).settings.kv_connector == "none"
    assert load([*NEEDED, "--bootstrap-port", "none"], {}).settings.bootstrap_port is None


def test_switches():
    assert load(NEEDED, {}).settings.response_headers
    assert not load([*NEEDED, "--no-response-headers"], {}).settings.response_headers
    off = {"CACHE_PROXY_RESPONSE_HEADERS": "false"}
    assert not load(NEEDED, off).settings.response_headers
    assert load([*NEEDED, "--response-headers"], off).settings.response_headers
    assert not load(NEEDED, {}).print_config
    assert load([*NEEDED, "--print-config"], {}).print_config


def test_the_variable_of_the_installation_is_no_option():
    assert load(NEEDED, {"CACHE_PROXY_COMPILE": "1"}).settings == load(NEEDED, {}).settings


def test_variables_of_a_kubernetes_service_are_not_options():
    state = {
        "CACHE_PROXY_SERVICE_HOST": "10.0.0.1",
        "CACHE_PROXY_SERVICE_PORT_HTTP": "8000",
        "CACHE_PROXY_PORT": "tcp://10.0.0.1:8000",
        "CACHE_PROXY_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert load(NEEDED, state).settings.port == 8000


TEXT = st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1)


HOSTS = st.sampled_from(["h", "gpu-1.lan", "10.0.0.1", "[::1]", "[fe80::2]"])


PORTS = st.integers(1, 65535)


@st.composite
def specs(draw):
    host, port, scheme = draw(HOSTS), draw(PORTS), draw(st.sampled_from(["http", "https"]))
    name = draw(st.from_regex(r"[a-z0-9][A-Za-z0-9._:-]{0,9}", fullmatch=True) | st.none())
    bootstrap = draw(st.none() | PORTS.map(lambda number: f"http://{host}:{number}"))
    return InstanceSpec(name or f"{host}:{port}", f"{scheme}://{host}:{port}", bootstrap)


def unique_instances():
    return st.lists(
        specs(), min_size=1, max_size=4, unique_by=(lambda s: s.name, lambda s: s.url)
    ).map(tuple)


def positive(**bounds):
    return st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False, **bounds)


@st.composite
def valid_settings(draw):
    fields = {
        "instances": unique_instances(),
        "host": TEXT,
        "port": st.integers(0, 65535),
        "model": st.none() | TEXT.filter(lambda text: text != "none"),
        "prefill_throughput": st.floats(0.001, 1e9),
        "warm_threshold": st.integers(0, 8192),
        "active_decode_blocks_threshold": st.none() | st.floats(0, 1),
        "active_prefill_tokens_threshold": st.none() | st.integers(0, 10**12),
        "active_prefill_tokens_threshold_frac": st.none() | st.floats(0, 1e9),
        "prefix_cache_bytes": st.integers(1 << 20, 1 << 50).map(ByteSize),
        "max_body_bytes": st.integers(0, 30).map(lambda bits: ByteSize(1024 << bits)),
        "idle_timeout": positive(max_value=1e6),
        "overload_status": st.sampled_from([503, 529]),
        "offload_policy": st.sampled_from(get_args(Settings.model_fields["offload_policy"].kind)),
        "response_headers": st.booleans(),
        "request_log": st.none() | TEXT.map(lambda text: Path("logs", text)),
    }
    return Settings(**draw(st.fixed_dictionaries(fields)))


@pytest.mark.long
@given(settings=valid_settings())
def test_print_config_reads_back_equal(tmp_path_factory, settings):
    origins = dict.fromkeys(Settings.model_fields, "flag --x\n\x01")
    text = print_config(Loaded(settings, origins, print_config=True))
    path = write(tmp_path_factory.mktemp("printed"), text)
    again = load(["--config", str(path)], {})
    assert again.settings == Settings(**vars(settings) | {"config": path})


def test_print_config_shows_every_origin(tmp_path):
    path = write(tmp_path, "host = '::'")
    loaded = load([*NEEDED, "--config", str(path)], {"CACHE_PROXY_PORT": "9"})
    lines = print_config(loaded).splitlines()
    assert f'# config = "{path}"  # flag --config' in lines
    assert f'host = "::"  # file {path}' in lines
    assert "port = 9  # env CACHE_PROXY_PORT" in lines
    assert 'instances = ["http://a:1"]  # flag --instances' in lines
    assert 'max_body_bytes = "32MiB"  # default' in lines
    assert len(lines) == len(Settings.model_fields)


def test_default_toml_uncommented_gives_the_defaults(tmp_path):
    lines = (line.removeprefix("# ") for line in default_toml().splitlines())
    settings_lines = [line for line in lines if line.partition(" = ")[0] in Settings.model_fields]
    assert len(settings_lines) == len(Settings.model_fields) - 1  # all but config
    path = write(tmp_path, "\n".join(settings_lines))
    expected = Settings(instances="127.0.0.1:8001,127.0.0.1:8002", config=path)
    assert load(["--config", str(path)], {}).settings == expected
    assert tomllib.loads(default_toml()) == {}


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        load(["--version"], {})
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("cache-proxy 0.")
