"""Thermal control of a virtual fleet: cool, it changes nothing; hot, it holds and loses nobody."""

from __future__ import annotations

import pytest

from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.thermal.controller import Controller
from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.options import ThermalOptions
from proxy.core.types import RouterConfig
from replayer.engine.heat import FirstOrderPlant, Plant, PlantOptions
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import Planned
from replayer.virtual.fleet import VirtualFleet
from replayer.virtual.heat import HeatRow
from replayer.virtual.load import TraceTurn
from replayer.virtual.requests import HeatOptions, Loss, VirtualOptions, VirtualRow

BLOCK = 512
ENGINE = EngineOptions(block_size=BLOCK, num_blocks=1000, max_model_len=1000 * BLOCK)


def load(requests: int, every_s: float, output: int = 400) -> list[Planned]:
    """Sessions of three turns each, a new request every so often."""
    planned = []
    for n in range(requests):
        blocks = 4 + 2 * (n % 3)
        ids = tuple(1000 * (n // 3) + at for at in range(blocks))
        session = f"s{n // 3}"
        turn = TraceTurn(session, blocks * BLOCK + 100, output, 100, ids, 0, (), 0.0, 0.0)
        planned.append(Planned(turn, session, every_s * n, delay_s=0.0, wait_for=()))
    return planned


def control() -> FleetControl:
    options = ThermalOptions(max_running=64, safe_cap=16)
    return FleetControl(lambda policy: Controller(options, policy))


def run(
    planned: list[Planned],
    policy: str,
    heat: HeatOptions | None,
    limit: int = 0,
    losses: tuple[Loss, ...] = (),
) -> tuple[list[VirtualRow], list[HeatRow]]:
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000, offload_policy=policy)))
    options = VirtualOptions((ENGINE,) * 2, BLOCK, migration_limit=limit, losses=losses, heat=heat)
    fleet = VirtualFleet(planned, router, options)
    found = fleet.run()
    assert found.drift == 0
    assert router.known.ledger.live == 0
    return found.rows, fleet.heat_rows


@pytest.mark.parametrize("policy", ["cost", "seed-heuristic"])
def test_while_all_is_cool_every_row_is_as_without_control(policy: str) -> None:
    planned = load(90, 0.4)
    cool, heat = run(planned, policy, HeatOptions(control))
    off, none = run(planned, policy, None)
    assert cool == off
    assert {(row.state, row.cap) for row in heat} == {("NORMAL", None)}
    assert max(row.celsius for row in heat) < 78.0
    assert not none


def hot(name: str) -> Plant:
    """The air of one engine is warm: 30 running sequences would take it to 88 degrees."""
    return FirstOrderPlant(PlantOptions(ambient_celsius=66.0 if name == "e0" else 32.0))


@pytest.mark.long
def test_a_hot_engine_is_held_at_its_target_and_the_other_takes_more() -> None:
    planned = load(900, 0.1, output=300)
    held, free = (run(planned, "cost", HeatOptions(one, hot)) for one in (control, FleetControl))
    peaks = [max(row.celsius for row in heat if row.name == "e0") for _, heat in (held, free)]
    assert peaks[1] > 86.0, "nobody holds it"
    assert peaks[0] <= 82.0 + 1.5
    shares = [sum(row.decode == "e0" for row in rows) for rows, _ in (held, free)]
    assert shares[0] < 0.8 * shares[1]


def test_hot_everywhere_requests_wait_in_the_queue_and_all_are_served() -> None:
    planned = load(200, 0.05, output=200)
    warm = HeatOptions(control, lambda name: FirstOrderPlant(PlantOptions(ambient_celsius=64.0)))
    rows, heat = run(planned, "cost", warm)
    assert all(row.outcome == "ok" for row in rows)
    assert any(row.cap is not None for row in heat)
    assert sum(row.rejects for row in rows) > 0, "some were told when to come again"
    assert max(row.celsius for row in heat) <= 82.0 + 1.5


class Failing(FirstOrderPlant):
    """A plant whose cooling fails after a few seconds."""

    steps = 0

    def step(self, dt_s: float, running: int, kv_tokens: int, prefill_tps: float) -> None:
        self.steps += 1
        if self.steps == 8:
            self.ambient_celsius += 60.0
        super().step(dt_s, running, kv_tokens, prefill_tps)


def failing(name: str) -> Plant:
    return Failing() if name == "e0" else FirstOrderPlant()


@pytest.mark.long
@pytest.mark.parametrize(
    "losses", [(), (Loss(0, 9.0, 14.0),), (Loss(0, 9.1, 9.6),), (Loss(1, 9.0, 14.0),)]
)
def test_what_runs_too_hot_goes_on_where_it_is_cool(losses: tuple[Loss, ...]) -> None:
    planned = load(150, 0.1, output=1200)
    stay, _ = run(planned, "cost", HeatOptions(control, failing))
    assert not any(row.moves for row in stay)
    rows, heat = run(planned, "cost", HeatOptions(control, failing), limit=3, losses=losses)
    assert all(row.outcome == "ok" for row in rows)
    assert "EMERGENCY" in {row.state for row in heat}
    assert all(row.celsius > 40.0 for row in heat), "no plant was cooled by its engine's death"
    moved = [row.moves for row in rows if row.moves]
    assert moved
    assert max(moved) <= 2 + len(losses), "twice for heat, and with its engine"
