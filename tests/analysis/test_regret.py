"""The rollout oracle: branches are faithful, gaps are gaps, and the command says so."""

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import psutil
import pytest

from analysis.cli import main
from analysis.league.fleet import EngineFleet, engines
from analysis.league.simulate import make_rule, run_policy, setting
from analysis.regret.actions import Action, forced, is_heavy
from analysis.regret.branching import BranchingFleet, Postponed, Terms, cost_s, objective_s
from analysis.regret.oracle import JudgedDecision, Mode, Tried, held_out_ratio
from analysis.regret.regret import RegretError, RegretOptions, compute_regret
from analysis.regret.run import RegretTask, run_probed, run_regret, sample
from analysis.regret.summary import missed, regret_ratios
from analysis.regret.tables import explain
from analysis.rivals.registry import RIVALS
from proxy.core.latency.slo import Slo
from proxy.core.placement.policies import POLICIES
from proxy.core.placement.scene import Choice, Decide, PlacementView
from proxy.core.routing.router import Router
from replayer.virtual.arrivals import LoadRules, plan
from replayer.virtual.load import load_source
from replayer.virtual.requests import VirtualRow, VirtualRun

TRACE = Path(__file__).parents[2] / "replayer" / "data" / "agentic_sample.trace.jsonl.gz"
SOURCE = load_source(TRACE)
RULES = LoadRules(rate=0.2, horizon_s=90.0, think_cap_s=5.0)
PLANNED = plan(SOURCE, RULES)
FLEET = EngineFleet(engines(3, 200_000, SOURCE.block_tokens))
TASK = RegretTask("cost", "given", "watch", RULES, FLEET, 4)


def _watched(task: RegretTask = TASK) -> tuple[list[JudgedDecision], VirtualRun]:
    wanted = frozenset(range(0, 12, 3))
    probe, run = run_probed(task, PLANNED, SOURCE.block_tokens, Mode.WATCH, wanted)
    return probe.decisions, run


Watched = tuple[list[JudgedDecision], VirtualRun]


@pytest.fixture(scope="module")
def watched() -> Watched:
    return _watched()


def test_to_watch_changes_nothing_and_leaves_nothing(watched: Watched) -> None:
    _decisions, plain = watched
    assert run_policy("cost", PLANNED, FLEET, SOURCE.block_tokens) == plain
    before = _children()
    _again, run = _watched()
    assert run == plain
    assert _children() == before


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def _total_s(run: VirtualRun) -> float:
    return math.fsum(cost_s(row, RULES.slo, FLEET.timeout_s) for row in run.rows)


def test_a_branch_with_the_chosen_action_is_the_run_itself(watched: Watched) -> None:
    decisions, plain = watched
    assert len(decisions) == 4
    for one in decisions:
        outcome = one.chosen.outcomes[0]
        assert outcome.cost_s == _total_s(plain)
        assert outcome.requests == len(PLANNED)
        assert outcome.own_ttft_s == plain.rows[one.request].ttft_s


def _replayed(change: Callable[[int, PlacementView, Choice], Choice]) -> VirtualRun:
    """The run anew, from its start and in this process, with HEAVY decisions changed by number."""
    rival = RIVALS["cost"]
    config, options = setting(rival, FLEET, SOURCE.block_tokens)
    policy: Decide = make_rule(rival, FLEET) or POLICIES[config.offload_policy]
    seen = -1

    def decide(scene: PlacementView) -> Choice:
        nonlocal seen
        choice = policy(scene)
        if not is_heavy(scene, choice):
            return choice
        seen += 1
        return change(seen, scene, choice)

    router = Router(config, decide=decide)
    return BranchingFleet(PLANNED, router, options, [], Terms(RULES.slo)).run()


@pytest.mark.parametrize("place", range(4))
def test_a_branch_is_what_a_run_with_that_action_would_have_been(
    place: int, watched: Watched
) -> None:
    decisions, _run = watched
    one = decisions[place]
    kinds: dict[str, Tried] = {}
    for tried in one.tried:
        kinds.setdefault(tried.action.kind(one.home), tried)
    for tried in kinds.values():
        action = tried.action

        def change(
            number: int, scene: PlacementView, choice: Choice, action: Action = action
        ) -> Choice:
            return forced(scene, action) if number == one.number else choice

        assert _total_s(_replayed(change)) == tried.outcomes[0].cost_s


def test_gaps_are_never_negative_and_actions_never_repeat(watched: Watched) -> None:
    decisions, _run = watched
    for one in decisions:
        assert one.gap_s >= 0.0
        assert one.floor_ratio >= 0.0
        assert one.held_out_ratio is None
        kinds = [tried.action for tried in one.tried]
        assert len(set(kinds)) == len(kinds) <= 10
        assert {a.decode for a in kinds if a.prefill is None} == {"e0", "e1", "e2"}
        assert len(one.placebo) == len(kinds) - 1


def test_a_rule_that_looks_at_nothing_leaves_something_to_gain() -> None:
    decisions, _run = _watched(replace(TASK, policy="round-robin"))
    assert any(one.gap_s > 0.0 for one in decisions)


def test_an_oracle_that_knows_the_future_never_loses_and_has_no_regret_of_its_own(
    watched: Watched,
) -> None:
    _decisions, plain = watched
    probe, run = run_probed(TASK, PLANNED, SOURCE.block_tokens, Mode.ROLLOUT, frozenset(range(5)))
    assert _total_s(run) <= _total_s(plain)
    assert _total_s(run) == probe.decisions[-1].best.cost_s
    actions = {d.number: d.best.action for d in probe.decisions if d.best is not d.chosen}
    again = _replayed(
        lambda number, scene, choice: (
            forced(scene, actions[number]) if number in actions else choice
        )
    )
    assert _total_s(again) == _total_s(run)
    assert regret_ratios([_total_s(again)], [_total_s(run)]) == [0.0]


def test_luck_is_found_by_postponing_alone(watched: Watched) -> None:
    _decisions, plain = watched
    _probe, run = run_probed(TASK, PLANNED, SOURCE.block_tokens, Mode.PLACEBO, frozenset(range(4)))
    assert _total_s(run) <= _total_s(plain)
    assert run.drift == 0


def test_resampled_futures_are_the_same_for_every_action_and_every_time(
    watched: Watched,
) -> None:
    task = replace(TASK, horizon_s=20.0, futures=2)
    decisions, run = _watched(task)
    assert run == watched[1]
    again, _run = _watched(task)
    assert [d.as_dict() for d in decisions] == [d.as_dict() for d in again]
    for one in decisions:
        first, second = one.chosen.outcomes
        assert first.members != second.members or first.cost_s != second.cost_s
        assert all(t.outcomes[0].members == first.members for t in one.tried)
        assert all(o.requests == len(o.members or ()) for t in one.tried for o in t.outcomes)
        assert one.held_out_ratio is not None


def test_held_out_gaps_are_judged_where_nothing_was_chosen() -> None:
    assert held_out_ratio([[2.0, 2.0], [1.0, 1.0]]) == 1.0
    # Each action is the better one in one future: whoever chooses by the other one is wrong.
    assert held_out_ratio([[1.0, 2.0], [2.0, 1.0]]) == pytest.approx((1 / 2 - 1) / 2)
    assert held_out_ratio([[1.0]]) is None


def test_a_sample_depends_on_the_seed_alone() -> None:
    assert sample(3, 5, 0) == frozenset(range(3))
    assert len(sample(100, 10, 1)) == 10
    assert sample(100, 10, 1) == sample(100, 10, 1) != sample(100, 10, 2)


def test_a_failure_costs_its_timeout_and_a_second_try() -> None:
    row = VirtualRow(0, "s", 0.0, 1000, 101, 1000, outcome="timeout")
    assert cost_s(row, Slo(), 60.0) == pytest.approx(60.0 + 2.1 + 5.05 + 10.0)
    good = replace(row, outcome="ok", ttft_s=1.0, end_s=2.0)
    assert objective_s([good, row], Slo(), 60.0) == pytest.approx((2.0 + 77.15) / 2)


def test_actions_have_names() -> None:
    assert Action("a").kind(None) == "place"
    assert Action("a").kind("a") == "colocate"
    assert Action("a").kind("b") == "rehome"
    assert Action("a", "b").kind("a") == Action("a", "b").kind(None) == "offload"
    assert Action("a", "b").kind("b") == "pull"
    assert Action("a", "b").kind("c") == "offload-rehome"


def test_a_branch_that_breaks_is_an_error_here_and_nothing_is_left() -> None:
    def broken(scene: PlacementView) -> Choice:
        if fleet.is_branch or fleet.branch(scene.now_s, None, None) is None:
            raise ValueError("broken rule")
        raise Postponed(1.0)

    before = _children()
    rival = RIVALS["cost"]
    config, options = setting(rival, FLEET, SOURCE.block_tokens)
    router = Router(config, decide=broken)
    fleet = BranchingFleet(PLANNED, router, options, [], Terms(RULES.slo))
    with pytest.raises(RuntimeError, match="a branch of the run died"):
        fleet.run()
    assert _children() == before


def test_a_worker_ends_with_its_caller() -> None:
    code = "import time; from analysis.regret.worker import call; call(time.sleep, 50)"
    with subprocess.Popen([sys.executable, "-c", code]) as caller:
        workers: list[psutil.Process] = []
        while not workers or "analysis.regret.worker" not in workers[0].cmdline():
            time.sleep(0.05)
            workers = psutil.Process(caller.pid).children()
        # Its timer runs once it has read its call.
        time.sleep(1.0)
        caller.kill()
    _gone, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert not alive


def test_the_worst_are_told_in_words(watched: Watched) -> None:
    decisions, _run = watched
    one = max(decisions, key=lambda d: d.gap_s)
    text = explain(7, one)
    assert "\n" not in text
    for part in ("seed 7", f"of {one.session_id}", "realised", "Better:", "queue", "Gap"):
        assert part in text
    found = missed(decisions)
    assert sum(kind["decisions"] for kind in found) == sum(d.gap_s > 0 for d in decisions)


COMMAND = (
    "--instances 2 --load 0.8 --scale 0.2:200000 --load-horizon 60 --think-cap 5 --seeds 1 "
    "--decisions 3 --futures 2 --horizon 10s --jobs 1"
)


def test_the_command_prints_regret_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "regret.json"
    assert main(["regret", str(TRACE), *COMMAND.split(), "--json", str(out)]) == 0
    found = orjson.loads(out.read_bytes())
    assert [one["policy"] for one in found["summary"]] == ["cost", "session-sticky"]
    for one in found["summary"]:
        assert one["mean_regret"].keys() == {"mean", "low", "high"}
        assert sum(one["mix"].values()) == sum(one["oracle_mix"].values()) == one["decisions"]
    assert min(one["mean_regret_own_rollout"]["mean"] for one in found["summary"]) > -1.0
    assert [(r["policy"], r["mode"]) for r in found["runs"]] == [
        (policy, mode)
        for policy in ("cost", "session-sticky")
        for mode in ("watch", "rollout", "placebo")
    ]
    decision = found["decisions"][0]
    assert {"seed", "at_s", "home", "chosen", "best", "gap_s", "candidates"} <= decision.keys()
    assert decision["gap_s"] >= 0.0
    printed = capsys.readouterr().out
    for part in ("mean regret %", "noise floor %", "worst decisions", "oracle: rollout over"):
        assert part in printed


def test_the_worker_computes_what_this_process_computes() -> None:
    options = RegretOptions(TRACE, instances=2, policies=("cost",), seeds=1, decisions=2)
    with pytest.raises(RegretError, match="--futures"):
        compute_regret(replace(options, futures=0), lambda _n, _of: None)
    task = replace(TASK, decisions=2, horizon_s=10.0)
    assert run_regret(SOURCE, task).row == run_regret(SOURCE, task).row


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("--policies nobody", "--policies"),
        ("--regime nowhere", "--regime"),
        ("--instances 1", "--instances"),
        ("--decisions -1", "--decisions"),
        ("--jobs 0", "--jobs"),
    ],
)
def test_bad_input_is_one_line(wrong: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regret", str(TRACE), *wrong.split()]) == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("wrong", ["--oracle delphi", "--horizon soon", "--load 0", "--scale x"])
def test_bad_options_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["regret", str(TRACE), *wrong.split()])
    assert wrong.split()[0] in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regret", "/nowhere.jsonl", *COMMAND.split()]) == 2
    assert capsys.readouterr().err.startswith("analyze: ")
