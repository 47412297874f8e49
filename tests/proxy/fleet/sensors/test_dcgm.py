"""dcgm-exporter's text, by its documented form; not recorded from hardware."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.thermal.readings import GpuReading
from proxy.fleet.sensors import dcgm
from proxy.fleet.sensors.dcgm import is_slowed, readings
from tests.support.harness import at_once

LABELS = (
    'gpu="%d",UUID="GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e5%d",pci_bus_id="00000000:1%d:00.0",'
    'device="nvidia%d",modelName="NVIDIA H100 80GB HBM3",Hostname="node1",'
    'DCGM_FI_DRIVER_VERSION="570.86.15"'
)


def labels(index: int) -> str:
    return LABELS % (index, index, index, index)


def parse(text: str) -> dcgm.Series:
    """The wanted series of an exposition."""
    return at_once(dcgm.parse(text.encode("utf-8", "replace")))


def exposition(reasons: int | None = 0, violation: int = 0) -> str:
    """Two GPUs; the second one has no memory sensor, so the exporter tells its blank value."""
    first, second = labels(0), labels(1)
    text = f"""# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{first}}} 1980
DCGM_FI_DEV_SM_CLOCK{{{second}}} 1980
# HELP DCGM_FI_DEV_MEMORY_TEMP Memory temperature (in C).
# TYPE DCGM_FI_DEV_MEMORY_TEMP gauge
DCGM_FI_DEV_MEMORY_TEMP{{{first}}} 78
DCGM_FI_DEV_MEMORY_TEMP{{{second}}} 9223372036854775794
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{{{first}}} 71
DCGM_FI_DEV_GPU_TEMP{{{second}}} 64
# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{{{first}}} 512.347000
DCGM_FI_DEV_POWER_USAGE{{{second}}} 433.100000
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{{first}}} 93
DCGM_FI_DEV_GPU_UTIL{{{second}}} 88
# HELP DCGM_FI_DEV_THERMAL_VIOLATION Throttling duration due to thermal constraints (in us).
# TYPE DCGM_FI_DEV_THERMAL_VIOLATION counter
DCGM_FI_DEV_THERMAL_VIOLATION{{{first}}} {violation}
# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{{{first}}} 73210
DCGM_FI_DEV_FB_USED{{{second}}} 73208
# HELP DCGM_FI_PROF_PCIE_TX_BYTES The rate of data transmitted over the PCIe bus.
# TYPE DCGM_FI_PROF_PCIE_TX_BYTES gauge
DCGM_FI_PROF_PCIE_TX_BYTES{{{first}}} 1234567890
"""
    if reasons is not None:
        text += f"DCGM_FI_DEV_CLOCKS_EVENT_REASONS{{{first}}} {reasons}\n"
    return text


def test_an_exposition_is_read_by_gpu() -> None:
    assert readings("node1", parse(exposition()), {}, 5.0) == [
        GpuReading(
            gpu="node1:0",
            at_s=5.0,
            celsius=71.0,
            memory_celsius=78.0,
            watts=512.347,
            utilization_ratio=0.93,
            memory_used_bytes=73210 << 20,
            pcie_tx_bytes_per_s=1234567890.0,
        ),
        GpuReading(
            gpu="node1:1",
            at_s=5.0,
            celsius=64.0,
            watts=433.1,
            utilization_ratio=0.88,
            memory_used_bytes=73208 << 20,
        ),
    ]


@pytest.mark.parametrize(
    ("reasons", "violations", "slowed"),
    [
        (0x0, (0, 0), False),
        (0x4, (0, 9), False),  # the power cap; the counter is not asked where reasons are told
        (0x20, (0, 0), True),
        (0x40 | 0x8, (0, 0), True),
        (0x8, (0, 0), False),  # the hardware, but for its power brake
        (None, (5, 5), False),
        (None, (5, 6), True),
    ],
)
def test_heat_is_a_reason_or_a_rise_of_the_violations(
    reasons: int | None, violations: tuple[int, int], slowed: bool
) -> None:
    before, now = (parse(exposition(reasons, one)) for one in violations)
    assert is_slowed(now[0], before[0]) is slowed
    assert reasons is not None or not is_slowed(now[0], {}), "one exposition shows no rise"


def test_older_versions_have_another_name_for_the_reasons() -> None:
    text = f"DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{{{labels(3)}}} 64\n"
    (found,) = readings("h", parse(text), {}, 0.0)
    assert (found.gpu, found.is_slowed) == ("h:3", True)


def test_of_a_split_gpu_the_hottest_part_counts() -> None:
    part = 'gpu="0",GPU_I_PROFILE="1g.10gb",GPU_I_ID="%d"'
    text = "".join(f"DCGM_FI_DEV_GPU_TEMP{{{part % n}}} {70 + n}\n" for n in (9, 7, 8))
    assert parse(text) == {0: {"DCGM_FI_DEV_GPU_TEMP": 79.0}}


@settings(max_examples=40)
@given(st.integers(0, len(exposition())))
def test_a_cut_exposition_has_no_wrong_number(length: int) -> None:
    whole = parse(exposition())
    for index, values in parse(exposition()[:length]).items():
        assert values.items() <= whole[index].items()


@settings(max_examples=40)
@given(st.text(max_size=200) | st.from_regex(r'DCGM_FI_DEV_GPU_TEMP\{gpu="0"\} .{0,20}\n'))
def test_any_text_gives_readings_that_can_be(text: str) -> None:
    for reading in readings("h", parse(text), {}, 0.0):
        assert reading.celsius is None or -40 <= reading.celsius <= 200


@pytest.mark.parametrize("line", ["DCGM_FI_DEV_GPU_TEMP{\n", "DCGM_FI_DEV_GPU_TEMP{,,,,,gpu", "\n"])
def test_no_exposition_takes_long(line: str) -> None:
    begun_s = time.thread_time()
    assert parse(line * ((1 << 20) // len(line))) == {}
    assert time.thread_time() - begun_s < 0.5
