"""Runs with known constants, and how near a fit comes to them."""

from pathlib import Path
from typing import Any

import pytest

from analysis.check.check import (
    Check,
)
from analysis.check.fit import Constants
from replayer.engine.costs import IntakeCost
from tests.support.recorded import write_run
from tests.support.traces import sample_in_blocks_of

SLOW = Constants(
    a0=12e-3, a1=70e-6, a2=2e-4, a3=9e-8, a4=4e-10, x0=0.05, x1=1e-5,
    intake=4e-3, intake_per_token=4e-7,
)  # fmt: skip
PROXY = IntakeCost(3e-3, 2e-7)


FITTED_BLOCK_TOKENS = 256
"""A fit repeats its run a thousand times: with blocks of 64 tokens each takes twice as long."""


def write_run_to_fit(folder: Path, constants: Constants, limit: int, **options: Any) -> None:
    """Write down a run whose constants are then fitted."""
    trace = sample_in_blocks_of(FITTED_BLOCK_TOKENS, folder)
    write_run(folder, constants, PROXY, limit=limit, trace=trace, **options)


def chunk_s(constants: Constants) -> float:
    """A step of 8,192 prefill tokens after 16,384, beside four streams."""
    pairs = 8_192 * (16_384 + 4_096)
    own = constants
    return own.a0 + own.a1 * 8_192 + own.a2 * 4 + own.a3 * 80_000 + own.a4 * pairs


def assert_recovered(check: Check, constants: Constants) -> None:
    found = check.fitted.constants
    assert found.a0 == pytest.approx(constants.a0, rel=0.02)
    assert found.a1 == pytest.approx(constants.a1, rel=0.15)
    assert found.a3 == pytest.approx(constants.a3, rel=0.1)
    # Some constants move the same times: what they say together is sharper than each alone.
    assert chunk_s(found) == pytest.approx(chunk_s(constants), rel=0.03)
    assert check.proxy.fixed_s == pytest.approx(PROXY.fixed_s, rel=0.01)
    assert check.proxy.per_token_s == pytest.approx(PROXY.per_token_s, rel=0.01)
