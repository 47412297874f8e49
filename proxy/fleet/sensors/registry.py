"""SENSORS: every kind of sensor by its name in an instance's entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from proxy.config.values import InstanceSpec
from proxy.fleet.sensors import nvml
from proxy.fleet.sensors.base import MakesSensor
from proxy.fleet.sensors.dcgm import Dcgm
from proxy.fleet.sensors.http_json import File, HttpJson
from proxy.fleet.sensors.programs import amd_smi, nvidia_smi
from proxy.fleet.sensors.simulated import Simulated

SENSORS: Mapping[str, MakesSensor] = {
    "dcgm": Dcgm,
    "nvml": nvml.Nvml,
    "nvidia-smi": nvidia_smi,
    "amd-smi": amd_smi,
    "http-json": HttpJson,
    "file": File,
    "simulated": Simulated,
}


def missing(specs: Iterable[InstanceSpec]) -> str | None:
    """The missing packages of these instances' sensors; None if all are installed."""
    for spec in specs:
        if any(sensor.kind == "nvml" for sensor in spec.sensors) and not nvml.is_installed():
            return f"instances: {spec.name}: ;nvml=: {nvml.MISSING}"
    return None
