"""Every numeric option at its bounds: the proxy starts and serves, or one line says why not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from proxy.config.load import load
from proxy.config.model import FieldInfo, OptionError
from proxy.config.options import Settings
from proxy.config.sources import ConfigError, flag_of, options
from proxy.config.values import ByteSize
from replayer.simulator.host import SimFleet
from tests.support.harness import ServedProxy, addresses, chat
from tests.support.options import NEEDED

NUMERIC = {n: f for n, f, _ in options(Settings) if f.kind in (int, float, ByteSize)}
EXTREMES = (
    *("0", "-0.0", "-1", "5e-324", "1e-300", "0.5", "1", "1e9", "1e100", "1e308", "1e309"),
    *("inf", "nan", str(2**63), str(2**64), "9" * 400, "9" * 5000, "\u0663", "1_0", "1e5"),
)
SMALLEST = 5e-324
"""The lowest value above 0."""
BESIDE: dict[str, tuple[str, object]] = {
    "warm_threshold": ("heavy_threshold", 10**12),
    "heavy_threshold": ("warm_threshold", 0),
    "workers": ("share", "redis://127.0.0.1:1"),
}
"""What another option must be for this one to have any value."""
ENDS_EARLY = {
    *("connect_timeout", "health_timeout", "ttft_timeout", "total_timeout"),
    "max_memory_bytes",
}
"""Options at whose lowest value a request may be answered with an error, as they say."""


def ends(field: FieldInfo) -> tuple[float, float]:
    """The lowest and the highest value that an option's declaration allows."""
    lows = [SMALLEST if m.ge is None else m.ge for m in metas(field) if (m.ge, m.gt) != (None,) * 2]
    highs = [m.le for m in metas(field) if m.le is not None]
    assert len(lows) == len(highs) == 1, "a numeric option has a lowest and a highest value"
    return lows[0], highs[0]


def metas(field: FieldInfo) -> Iterator[Meta]:
    return (item for item in field.metadata if isinstance(item, Meta))


def taken(name: str, value: object) -> float | None:
    """The option's value if it is accepted; None if this very option is refused."""
    beside = dict([BESIDE[name]]) if name in BESIDE else {}
    try:
        return float(getattr(Settings(instances=["a:1"], **beside, **{name: value}), name))
    except OptionError as error:
        if error.name != name:
            raise
        return None


@pytest.mark.parametrize("name", NUMERIC)
def test_each_extreme_is_taken_within_the_ends_or_refused(name: str) -> None:
    low, high = ends(NUMERIC[name])
    assert (taken(name, str(low)), taken(name, str(high))) == (low, high)
    for text in EXTREMES:
        value = taken(name, text)
        assert value is None or low <= value <= high


@given(st.sampled_from(sorted(NUMERIC)), st.floats() | st.integers())
def test_a_bare_toml_number_means_the_same(name: str, number: float) -> None:
    low, high = ends(NUMERIC[name])
    value = taken(name, number)
    assert value is None or low <= value <= high


@pytest.mark.parametrize("name", NUMERIC)
def test_what_is_refused_is_named_in_one_line_with_value_and_range(name: str) -> None:
    """From other sources too: test_sources.py."""
    with pytest.raises(ConfigError) as refused:
        load([*NEEDED, f"{flag_of(name)}={'9' * 500}"], {})
    said = str(refused.value)
    assert said.startswith(f"{name} = '999")
    assert "allowed: " in said
    assert "\n" not in said
    assert len(said) < 400


@pytest.mark.long
async def test_the_proxy_starts_and_serves_at_either_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each option alone; the request is answered, and what operators look at too."""
    body = chat("a few words", max_tokens=2)
    async with SimFleet(1, speed=1000.0, tick=0.0) as fleet:
        for name, field in NUMERIC.items():
            if name in ("port", "admin_port", "workers"):
                continue  # the kernel chooses ports in tests; workers are processes of their own
            for value in ends(field):
                if (name, value) == ("header_timeout", SMALLEST):
                    continue  # it starts, and closes a connection before its first byte
                made = field.kind(value)
                own = {"health_interval": 60.0, "scrape_interval": 60.0, name: made}
                own |= dict([BESIDE[name]]) if name in BESIDE else {}
                caplog.clear()
                async with ServedProxy(tmp_path / "log", addresses(fleet), **own) as proxy:
                    answer = await proxy.post(body)
                    shown = [await get(proxy, path) for path in ("/instances", "/metrics")]
                where = f"{name} = {made!r}"
                early = name in ENDS_EARLY and value == ends(field)[0]
                assert answer.status in ((200, 502, 503, 504) if early else (200,)), where
                assert shown == [200, 200], where
                faults = [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]
                assert faults == [], where


async def get(proxy: ServedProxy, path: str) -> int:
    async with proxy.http.get(path) as response:
        await response.read()
        return response.status
