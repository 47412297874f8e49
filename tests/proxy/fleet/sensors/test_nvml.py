"""NVIDIA's library: how its answers are read, on a stand-in for it and on the package itself."""

from __future__ import annotations

import ast
import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.config.sensors import SensorAt
from proxy.core.thermal.readings import GpuReading
from proxy.fleet.sensors import nvml
from proxy.fleet.sensors.base import SensorError
from proxy.fleet.sensors.nvml import Library, Nvml
from proxy.net.upstream.pool import ConnectOptions

AT = SensorAt.parse("nvml", "local", "h")


class Package:
    """Stands in for the package where there is no GPU: two GPUs, the second one supports little."""

    NVML_TEMPERATURE_GPU = 0
    NVML_FI_DEV_MEMORY_TEMP = 82

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.opened = 0
        self.fault: str | None = None
        self.hangs: threading.Event | None = None

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        if self.hangs is not None:
            self.hangs.wait()
        if self.fault is not None:
            raise self.NVMLError(self.fault)
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        return 70 + handle

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        if handle:
            raise self.NVMLError("Not Supported")
        return 512_350

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=93, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=80 << 30, used=70 << 30, free=10 << 30)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> Any:  # noqa: N802
        value = SimpleNamespace(uiVal=78)
        return [SimpleNamespace(fieldId=fields[0], nvmlReturn=3 * handle, value=value)]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return 0x40 * handle


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package()
    monkeypatch.setattr("importlib.import_module", lambda name: made)
    monkeypatch.setattr(nvml, "LIBRARY", Library())
    return made


async def test_readings_of_two_gpus(package: Package) -> None:
    sensor = Nvml(AT, ConnectOptions(), 1.0)
    expected = [
        GpuReading("h:0", 3.0, 70.0, 78.0, 512.35, 0.93, 70 << 30),
        GpuReading("h:1", 3.0, 71.0, None, None, 0.93, 70 << 30, is_slowed=True),
    ]
    assert await sensor.read(3.0) == expected
    assert await sensor.read(3.0) == expected
    assert package.opened == 1, "it stays open"
    package.fault = "GPU is lost"
    with pytest.raises(SensorError, match="GPU is lost"):
        await sensor.read(4.0)
    assert package.opened == 0
    package.fault = None
    assert len(await sensor.read(5.0)) == 2


async def test_a_driver_that_hangs_is_given_up(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "CALL_S", 0.05)
    package.hangs = threading.Event()
    sensor = Nvml(AT, ConnectOptions(), 1.0)
    for _ in range(2):
        with pytest.raises(SensorError, match=r"no answer in 0\.05 s|not come back"):
            await sensor.read(0.0)
    package.hangs.set()
    package.hangs = None
    for thread in [thread for thread in threading.enumerate() if thread.name == "nvml"]:
        thread.join()
    monkeypatch.setattr(nvml, "CALL_S", 10.0)
    assert len(await sensor.read(0.0)) == 2


async def test_without_the_package_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", import_module)
    monkeypatch.setattr(nvml, "LIBRARY", Library())
    with pytest.raises(SensorError, match=r"pip install .* '\.\[nvml\]'"):
        await Nvml(AT, ConnectOptions(), 1.0).read(0.0)


def test_every_name_that_is_used_is_in_the_package() -> None:
    package = pytest.importorskip("pynvml")
    tree = ast.parse(inspect.getsource(nvml))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "nvml"
    }
    assert len(used) >= 10
    assert not {name for name in used if not hasattr(package, name)}
