"""The file of `--thermal`: what it may say, and a policy of an operator's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config.load import load
from proxy.config.sources import ConfigError
from proxy.config.thermal import POLICIES, read_plan
from proxy.core.thermal.readings import COOL, GpuReading, InstanceWork
from proxy.core.thermal.victims import Victim


class HalfWhenWarm:
    """Half of all places from 70 degrees on; whoever holds most leaves."""

    def __init__(self) -> None:
        self.celsius = 0.0

    def get_max_running_seqs(self, scheduler: object) -> int:
        del scheduler
        return 8 if self.celsius >= 70.0 else 16

    def select_victims(self, running: list[Victim], num_to_evict: int) -> list[Victim]:
        return running[:num_to_evict]

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        assert gpu_idx == 0
        self.celsius = temp_c


class Fails:
    """Cannot be made."""

    def __init__(self) -> None:
        raise LookupError("no licence")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with policies, as its metadata names them."""
    named = (
        f"half = {__name__}:HalfWhenWarm",
        f"fails = {__name__}:Fails",
        "lacks = pathlib:Path",
        "gone = no_such_module:Policy",
    )
    folder = tmp_path / "site" / "vendors_policies-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vendors-policies\nVersion: 1.0\n"
    )
    (folder / "entry_points.txt").write_text("\n".join((f"[{POLICIES}]", *named)) + "\n")
    monkeypatch.syspath_prepend(str(folder.parent))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "thermal.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target_celsius = 96", "target_celsius must be 30 to 95, not 96"),
        ("hysteresis_celsius = 1.9", "hysteresis_celsius must be 2 to 30"),
        ("law = 'bang'", "law must be one of p, aimd, pi, power"),
        ("speed = 1", "'speed' is not an option"),
        ("target_celsius = ", "thermal.toml: Invalid value"),
        ("policy = 'who'", "policy 'who' is not known; cache_proxy.thermal_policies: fails, gone"),
        ("policy = 7", "policy 7 is not known"),
        ("policy = 'fails'", "cannot be made: LookupError: no licence"),
        ("policy = 'lacks'", "has no get_max_running_seqs, select_victims, on_temp_reading"),
        ("policy = 'gone'", "cannot be made: ModuleNotFoundError"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        read_plan(path)
    said = str(raised.value)
    assert words in said
    assert str(path) in said
    assert "\n" not in said


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_plan(tmp_path / "none.toml")


def test_an_operators_own_policy_makes_the_cap(tmp_path: Path) -> None:
    text = "policy = 'half'\ntarget_celsius = 75\nmax_running = 16\nsafe_cap = 4\ndwell_s = 0"
    control = read_plan(written(tmp_path, text)).control()
    work = InstanceWork(running=16)
    caps = []
    for second, celsius in enumerate((40.0, 40.0, *[76.0] * 20)):
        readings = [GpuReading("h:0", float(second), celsius=celsius)]
        caps.append(control.tick("a", readings, work, float(second)).cap)
    assert caps[0] is None
    assert caps[-1] == 8
    assert control.tick("b", [GpuReading("h:0", 0.0, celsius=40.0)], work, 0.0) == COOL


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--enable-admin-api"], "has no effect with admin_port = none"),
        (["--enable-admin-api", "--admin-port", "1"], "needs a token or client certificates"),
        (["--thermal-may-abort"], "has no effect with thermal = none"),
    ],
)
def test_options_that_need_others(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(["--instances", "gpu-1", *flags], {})


def test_a_plugin_that_nothing_would_drive() -> None:
    with pytest.raises(ConfigError, match="'g:1': ;thermal=plugin has no effect without --thermal"):
        load(["--instances", "g:1;thermal=plugin"], {})
