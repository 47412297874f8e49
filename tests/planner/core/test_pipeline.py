"""A tick from observations to targets: floors, guards, limits, plugins of others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.budget import Limits
from planner.core.perf.capacity import Slo
from planner.core.pipeline import Failed, Heard, How, Pipeline, Plugin, Remote
from planner.core.predict.plugin import LoadPredict
from planner.core.propose.load import LoadDecision, LoadPropose
from planner.core.propose.throughput import ThroughputDecision, ThroughputPropose
from planner.core.rules import Rules
from planner.core.state import PlannerScalingState
from planner.core.types import (
    Capabilities,
    Context,
    Engine,
    FinalPrediction,
    Kind,
    Prediction,
    Proposal,
    Replicas,
    Stage,
    Target,
    Traffic,
)
from tests.planner.core.perf.test_capacity import line

OF = Capabilities(step_tokens=1000, max_seqs=64, kv_tokens=100_000)
LIMITS = Limits({"c": 1}, {"c": 1}, max_gpus=20)
RULES = Rules(Slo(0.5, 0.05), throughput_interval_s=180.0, predictor="constant")


@dataclass
class Planner:
    """The builtin plugins over one component with a model that is known."""

    rules: Rules = RULES
    state: PlannerScalingState = field(default_factory=PlannerScalingState)

    def __post_init__(self) -> None:
        self.state.models["c"] = line(0.01, 1 / 20_000, 1e-7)
        self.load = LoadPropose(self.rules, self.state)
        self.throughput = ThroughputPropose(self.rules, self.state)
        chosen = [self.load] * self.rules.load_scaling
        more = [self.throughput] * self.rules.throughput_scaling
        self.own: list[Plugin] = [LoadPredict(self.rules, self.state), *chosen, *more]
        self.pipeline = Pipeline(self.own, LIMITS)
        self.ticks = 0
        self.target = 2

    def tick(
        self, engines: tuple[Engine, ...], traffic: Traffic | None = None, pending: int = 0
    ) -> int:
        """One load interval; the target behind it."""
        self.ticks += 1
        context = Context(
            self.ticks,
            self.ticks * 5.0,
            {"c": Replicas(len(engines), self.target, pending)},
            {"c": OF},
            traffic,
            {"c": engines},
            baseline={"c": self.target},
        )
        self.state.learn(context.engines, self.rules.min_observations)
        self.target = self.pipeline.tick(context).targets["c"]
        return self.target


def idle(count: int) -> tuple[Engine, ...]:
    """They teach the model nothing: its numbers are known."""
    return tuple(Engine(str(i), None, 0.0, 1.0, 550.0) for i in range(count))


BUSY = Traffic(180.0, 180 * 60.0, 500.0, 100.0, 0.0)
"""60 requests a second; one instance carries 64 / (100 * 0.02952) = 21.7: three are needed."""


def test_throughput_alone_sets_the_target() -> None:
    planner = Planner(replace(RULES, load_scaling=False))
    assert planner.tick(idle(2), BUSY) == 3
    assert planner.throughput.decisions == {"c": ThroughputDecision.SCALE}


def test_beside_load_scaling_it_sets_a_floor_that_stands() -> None:
    planner = Planner()
    assert planner.tick(idle(2), BUSY) == 3
    assert planner.throughput.decisions == {"c": ThroughputDecision.FLOOR}
    for _ in range(100):
        assert planner.tick(idle(3)) == 3, "a dead source takes nothing away"
    assert planner.load.decisions == {"c": LoadDecision.CAPPED}


def test_load_goes_above_the_floor_one_at_a_time_and_comes_back() -> None:
    planner = Planner()
    planner.tick(idle(2), BUSY)
    late = tuple(Engine(str(i), None, 900.0, 60.0, 33_000.0, 20_000.0) for i in range(3))
    assert planner.tick(late) == 4
    assert planner.tick(late, pending=1) == 4, "one is on its way"
    assert planner.load.decisions == {"c": LoadDecision.IN_PROGRESS}
    assert planner.tick((*late, *late[:1])) == 5
    assert planner.tick(idle(5)) == 4
    assert planner.tick(idle(4)) == 3


def test_no_step_is_larger_than_the_most() -> None:
    planner = Planner(replace(RULES, load_scaling=False, max_step=2))
    assert planner.tick(idle(2), replace(BUSY, requests=180 * 400.0)) == 4


def test_what_is_not_known_changes_nothing() -> None:
    planner = Planner()
    assert planner.tick((), None) == 2
    assert planner.load.decisions == {"c": LoadDecision.NO_DATA}
    assert planner.throughput.decisions == {"c": ThroughputDecision.NO_DATA}
    assert planner.tick(idle(1), None) == 2
    assert planner.load.decisions == {"c": LoadDecision.INSUFFICIENT}
    planner.state.models.clear()
    other = Planner()
    other.state.models.clear()
    assert other.tick(idle(2), BUSY) == 2
    assert other.throughput.decisions == {"c": ThroughputDecision.NOT_READY}


ENGINES = st.builds(
    Engine,
    st.just("e"),
    st.one_of(st.none(), st.floats(0.005, 0.5)),
    st.floats(0, 1000),
    st.floats(0, 64),
    st.floats(0, 100_000),
    st.floats(0, 50_000),
    st.floats(0, 50_000),
)
TRAFFIC = st.one_of(
    st.none(),
    st.builds(
        Traffic,
        st.just(180.0),
        st.floats(0, 20_000),
        st.one_of(st.none(), st.floats(1, 8000)),
        st.one_of(st.none(), st.floats(1, 2000)),
        st.one_of(st.none(), st.floats(0, 1)),
    ),
)


@given(st.lists(st.tuples(st.lists(ENGINES, max_size=6), TRAFFIC, st.integers(0, 2)), max_size=12))
def test_never_below_the_floor_nor_over_the_budget(
    ticks: list[tuple[list[Engine], Traffic | None, int]],
) -> None:
    planner, floor = Planner(), 1
    for engines, traffic, pending in ticks:
        target = planner.tick(tuple(engines), traffic, pending)
        if (found := planner.state.floors.get("c")) is not None:
            floor = found.replicas
        assert min(floor, 20) <= target <= 20


@dataclass
class Says:
    """A plugin of somebody else."""

    said: Proposal | Prediction | None
    stage: Stage
    name: str = "theirs"
    priority: int = 50
    interval_s: float = 0.0
    holds: bool = False
    asked: int = 0

    def evaluate(self, context: Context) -> Proposal | Prediction | None:
        del context
        self.asked += 1
        return self.said


def context(now_s: float = 5.0) -> Context:
    return Context(1, now_s, {"c": Replicas(2, 2)}, {"c": OF}, baseline={"c": 2})


def wish(kind: Kind, replicas: int = 0) -> Proposal:
    return Proposal("theirs", (Target("c", kind, replicas),))


@pytest.mark.parametrize(
    ("stage", "said", "target"),
    [
        (Stage.PROPOSE, wish(Kind.SET, 7), 7),
        (Stage.RECONCILE, wish(Kind.AT_LEAST, 9), 9),
        (Stage.CONSTRAIN, wish(Kind.AT_MOST, 1), 1),
        (Stage.CONSTRAIN, wish(Kind.SET, 9), 2),
        (Stage.PROPOSE, wish(Kind.SET, 99), 20),
        (Stage.CONSTRAIN, wish(Kind.AT_LEAST, 99), 20),
        (Stage.PROPOSE, wish(Kind.SET, -9), 1),
        (Stage.PROPOSE, None, 2),
    ],
)
def test_no_plugin_gets_past_the_limits(stage: Stage, said: Proposal | None, target: int) -> None:
    assert Pipeline([Says(said, stage)], LIMITS).tick(context()).targets == {"c": target}


def test_a_rejection_ends_the_tick() -> None:
    more = Says(wish(Kind.SET, 7), Stage.PROPOSE, "more")
    stop = Says(wish(Kind.REJECT), Stage.CONSTRAIN)
    found = Pipeline([more, stop], LIMITS).tick(context())
    assert (found.targets, found.rejected_by) == ({"c": 2}, "theirs")


def test_the_first_to_say_a_figure_predicts_it() -> None:
    one = Says(Prediction(next_num_req=0.0), Stage.PREDICT, "a", 1)
    other = Says(Prediction(9.0, next_isl=7.0), Stage.PREDICT, "b", 2)
    found = Pipeline([other, one], LIMITS).tick(context()).prediction
    assert (found.next_num_req, found.next_isl) == (0.0, 7.0)


CHAIN: tuple[tuple[int, Prediction], ...] = (
    (30, Prediction(next_osl=100.0)),
    (50, FinalPrediction(next_num_req=60.0, next_osl=1.0)),
    (70, Prediction(next_isl=7.0, hit_ratio=0.5)),
)
"""Plugins at the stage PREDICT, by priority; the builtin forecast is that of 100."""


@pytest.mark.parametrize(
    ("chain", "predicted"),
    [
        (CHAIN, Prediction(60.0, None, 100.0)),
        (CHAIN[:1], Prediction(9.0, 500.0, 100.0, 0.25, 1.0)),
        (CHAIN[::2], Prediction(9.0, 7.0, 100.0, 0.5, 1.0)),
        (((200, FinalPrediction(hit_ratio=0.9)),), Prediction(9.0, 500.0, 200.0, 0.25, 1.0)),
        (((1, Prediction()), *CHAIN), Prediction(60.0, None, 100.0)),
        (((0, FinalPrediction(1.0, 2.0, 3.0)), *CHAIN), Prediction(1.0, 2.0, 3.0)),
    ],
)
def test_a_final_prediction_ends_the_chain(
    chain: tuple[tuple[int, Prediction], ...], predicted: Prediction
) -> None:
    told = Prediction(9.0, 500.0, 200.0, 0.25, 1.0)
    plugins = [Says(one, Stage.PREDICT, f"p{at}", at) for at, one in reversed(chain)]
    found = Pipeline(plugins, LIMITS).tick(replace(context(), prediction=told))
    assert found.prediction == predicted
    assert [one.asked for one in plugins] == [1] * len(plugins), "who does not count still learns"


def test_a_final_prediction_is_what_the_rules_scale_by() -> None:
    planner = Planner(replace(RULES, load_scaling=False))
    said = FinalPrediction(180 * 90.0, 500.0, 100.0)
    planner.pipeline = Pipeline([Says(said, Stage.PREDICT, "a", 50), *planner.own], LIMITS)
    assert planner.tick(idle(2), BUSY) == 5, "90 requests a second; one carries 21.7"
    assert planner.throughput.decisions == {"c": ThroughputDecision.SCALE}
    alone = FinalPrediction(180 * 90.0)
    planner.pipeline = Pipeline([Says(alone, Stage.PREDICT, "a", 50), *planner.own], LIMITS)
    assert planner.tick(idle(2), BUSY) == 5, "without lengths no load is known"
    assert planner.throughput.decisions == {"c": ThroughputDecision.PREDICT_FAILED}


@pytest.mark.parametrize(("holds", "target"), [(True, 7), (False, 2)])
def test_a_plugin_that_is_not_due(holds: bool, target: int) -> None:
    slow = Says(wish(Kind.SET, 7), Stage.PROPOSE, interval_s=10.0, holds=holds)
    pipeline = Pipeline([slow], LIMITS)
    assert pipeline.tick(context(5.0)).targets == {"c": 7}
    assert pipeline.tick(context(10.0)).targets == {"c": target}
    assert pipeline.tick(context(15.0)).targets == {"c": 7}
    assert slow.asked == 2


LIES = {
    "steps of no time": lambda n: Engine("x", 1e-9, 10.0 * n, 4, 900.0 * n),
    "steps of days": lambda n: Engine("x", 9e5, 10.0 * n, 4, 900.0 * n),
    "short steps": lambda n: Engine("x", 2e-4, 10.0 * n, 4, 900.0 * n),
    "huge prompts": lambda n: Engine("x", 0.01, 1e8, 4, 900.0 * n),
    "impossible": lambda n: Engine("x", 1e-200, 1e300, 4, 900.0 * n),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("honest", [2, 4])
def test_what_one_engine_tells_sets_no_model(lie: str, honest: int) -> None:
    def told(n: int, engine: int) -> Engine:
        prompts, kv = 10.0 * n, 900.0 * (n + engine)
        return Engine(f"e{engine}", 0.01 + prompts / 20_000 + kv * 1e-7, prompts, 4, kv)

    alone, beside = PlannerScalingState(), PlannerScalingState()
    for n in range(1, 20):
        own = [told(n, engine) for engine in range(honest)]
        alone.learn({"c": own}, 5)
        beside.learn({"c": [*own, LIES[lie](n)]}, 5)
    right, found = alone.model("c"), beside.model("c")
    assert right is not None
    assert found is not None
    for inputs in ((0.0, 900.0), (150.0, 9000.0), (1000.0, 20_000.0)):
        assert found(*inputs) == pytest.approx(right(*inputs), rel=0.1)


def test_of_two_engines_that_disagree_neither_is_believed() -> None:
    state = PlannerScalingState()
    state.models["c"] = line(0.01, 1 / 20_000, 1e-7)
    before = len(state.models["c"].observations)
    state.learn({"c": [Engine("a", 0.02, 10.0, 4, 900.0), Engine("b", 9.0, 10.0, 4, 900.0)]}, 5)
    assert len(state.models["c"].observations) == before


FAILS = [(now_s, Failed("x")) for now_s in (15.0, 17.0, 19.0, 78.0, 79.0, 84.0)]
"""The third begins 60 s of silence, and so does the one that is tried behind them."""


def remote(**more: Any) -> Remote:
    return Remote("theirs", Stage.PROPOSE, 50, **more)


def tick_with(pipeline: Pipeline, now_s: float, said: Proposal | Failed | None) -> Heard:
    """One tick in which the plugin of another process, if it is asked, says that."""
    steps = pipeline.steps(context(now_s))
    try:
        ask = next(steps)
        while True:
            ask = steps.send({one.name: said for one in ask.plugins})
    except StopIteration as end:
        (heard,) = end.value.heard
        assert isinstance(heard, Heard)
        return heard


def test_a_failure_between_two_answers_leaves_the_last_one_until_it_is_off() -> None:
    pipeline = Pipeline([], LIMITS)
    pipeline.add(remote(holds=True))
    first = wish(Kind.AT_MOST, 1)
    hows = []
    told: list[tuple[float, Proposal | Failed]] = [(0.0, first), (5.0, Failed("x")), (10.0, first)]
    for now_s, said in (*told, *FAILS, (139.0, first)):
        heard = tick_with(pipeline, now_s, said)
        hows.append((heard.how, heard.said is None))
    assert hows == [
        (How.ANSWERED, False),
        (How.FAILED, False),
        (How.ANSWERED, False),
        (How.FAILED, False),
        (How.FAILED, False),
        (How.FAILED, True),
        (How.OFF, True),
        (How.FAILED, True),
        (How.OFF, True),
        (How.ANSWERED, False),
    ]


def test_ticks_without_an_asker_go_on_without_those_plugins() -> None:
    pipeline = Pipeline([], LIMITS)
    pipeline.add(remote())
    found = pipeline.tick(context())
    assert (found.targets, found.heard[0].how) == ({"c": 2}, How.IDLE)
    pipeline.remove("theirs")
    assert pipeline.tick(context()).heard == ()
