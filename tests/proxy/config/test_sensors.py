"""The parts of an instance that say which GPUs are its own, and what reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.load import load
from proxy.config.sensors import FORMS, MOST_INDEX, GpuRange, JsonFields, SensorAt, Swing
from proxy.config.sources import ConfigError
from proxy.config.values import InstanceSpec


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("gpus=0-3+5;dcgm=9400", "gpus=0-3+5;dcgm=http://h:9400/metrics"),
        ("gpus=n1:0+N2:1-2;dcgm=http://n1:9400/m;dcgm=https://n2/m", None),
        ("nvml=local", "nvml=local"),
        ("nvidia-smi=local;gpus=7", "gpus=7;nvidia-smi=local"),
        ("amd-smi=local", "amd-smi=local"),
        ("http-json=https://bmc/x#/a/*/b&gpu=2", "http-json=https://bmc:443/x#/a/*/b&gpu=2"),
        ("http-json=8080", "http-json=http://h:8080/"),
        ("file=/run/gpus.json#celsius=/t&watts=/p", "file=/run/gpus.json#celsius=/t&watts=/p"),
        ("simulated=75", "simulated=75"),
        ("simulated=60-95.5/600", "simulated=60-95.5/600"),
    ],
)
def test_forms(text: str, whole: str | None) -> None:
    spec = InstanceSpec.parse(f"h:1;{text}")
    assert InstanceSpec.parse(str(spec)) == spec
    assert whole is None or str(spec) == f"http://h:1;{whole}"
    assert {urls for urls in spec.urls if urls != spec.url} == {
        sensor.url for sensor in spec.sensors if sensor.url
    }


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("gpus=0", "gpus without a sensor: give one of dcgm, nvml"),
        ("gpus=3-1;nvml=local", f"gpus '3-1': indices are 0 to {MOST_INDEX}"),
        ("gpus=128;nvml=local", f"gpus '128': indices are 0 to {MOST_INDEX}"),
        ("gpus=;nvml=local", "gpus '' is not [host:]index"),
        ("gpus=0;gpus=1;nvml=local", "part gpus is given twice"),
        ("dcgm=", "dcgm '' is not PORT or http(s)://host:port/path"),
        ("dcgm=0", "dcgm: port 0 is not within 1 to 65535"),
        ("dcgm=http://me:s3cret@h:1/", "dcgm: no user or password is taken here"),
        ("dcgm=http://10.0.0.256/", "256"),
        ("dcgm=http://h/#x", "'http://h/#x'"),
        ("nvml=/usr/bin/sh", "the only value is local"),
        ("nvidia-smi=", "the only value is local"),
        ("file=gpus.json", "file 'gpus.json' is not an absolute path"),
        ("http-json=http://b/#x=/y", "'x=/y' is not FIELD=/POINTER with one of celsius"),
        ("http-json=http://b/#gpu=1", "no field is named"),
        ("http-json=http://b/#/a&celsius=/b", "field celsius is given twice"),
        ("simulated=hot", "simulated 'hot' is not CELSIUS or LOW-HIGH/SECONDS"),
        ("simulated=90-60/5", "the lower degrees come first"),
        (";".join(["simulated=1"] * 17), "17 sensors, at most 16"),
    ],
)
def test_a_wrong_part_is_named_in_one_line(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--instances", f"h:1;{text}"], {})
    message = str(caught.value)
    assert "\n" not in message
    assert "s3cret" not in message
    assert part in message


@given(st.sampled_from([None, "n1", "[::1]"]), st.integers(0, MOST_INDEX), st.integers(0, 8))
def test_a_range_is_read_back_and_has_its_names(host: str | None, first: int, more: int) -> None:
    gpus = GpuRange(host, first, min(first + more, MOST_INDEX))
    assert GpuRange.parse(str(gpus)) == gpus
    names = gpus.names(host or "h")
    assert len(names) == len(set(names)) == gpus.last - gpus.first + 1
    assert names[0] == f"{host or 'h'}:{first}"
    assert gpus.names("another") == ([] if host else [n.replace("h:", "another:") for n in names])


def test_pointers_are_those_of_the_standard() -> None:
    fields = JsonFields.parse("/a~1b/~0c/*&watts=/p&gpu=3")
    assert fields.pointers == (("celsius", ("a/b", "~c", "*")), ("watts", ("p",)))
    assert fields.first == 3


def test_the_hosts_that_names_begin_with() -> None:
    local = InstanceSpec.parse("h:1;nvml=local").sensors[0]
    far = InstanceSpec.parse("h:1;dcgm=http://N1:9400/metrics").sensors[0]
    assert (local.host, far.host, far.path) == ("h", "n1", "/metrics")
    assert SensorAt.parse("simulated", "60-90/20", "h").swing == Swing(60.0, 90.0, 20)
    assert set(FORMS) >= {"dcgm", "file"}
