"""What makes two runs no pair."""

import pytest

from analysis.cli import main
from analysis.report.confounders import KINDS, confounders, has_same_text
from tests.analysis.test_cli import folder
from tests.support.runs import row, run

BASE = {
    "planned": 1,
    "mode": "sessions",
    "concurrency": 4,
    "speedup": 2.0,
    "time_scale": 2.0,
    "seed": 1,
    "seed_is_given": True,
    "plan_digest": "d",
    "model": "m",
    "settings": {"endpoint": "chat", "think_cap_s": None},
}


def counters(*sizes):
    read = {"local_queries": 0.0}
    names = [f"e{at}" for at in range(len(sizes))]
    return {
        "engine_counters": {
            "source": "engines",
            "before": dict.fromkeys(names, read),
            "after": dict.fromkeys(names, read),
            "layouts": {name: size for name, size in zip(names, sizes, strict=True) if size},
        }
    }


@pytest.mark.parametrize(
    ("changed", "kind", "told"),
    [
        ({"plan_digest": "other", "planned": 2}, "trace", "1 and 2 requests"),
        ({"plan_digest": None, "trace": "a/u.jsonl"}, "trace", "t.jsonl and u.jsonl"),
        ({"seed": 2}, "seed", "--seed 1 and --seed 2"),
        ({"seed": 9, "seed_is_given": False}, "seed", "--seed 1 and new words"),
        ({"mode": "open", "concurrency": None}, "pace", "mode sessions and open"),
        ({"concurrency": 8}, "pace", "concurrency 4 and 8"),
        ({"speedup": 4.0}, "pace", "speedup for the target 1 and 2"),
        ({"settings": {"endpoint": "completions"}}, "settings", "endpoint chat and completions"),
        ({"settings": {"think_cap_s": 1.0}}, "settings", "think_cap_s None and 1"),
        ({"model": "n"}, "model", "model m and n"),
        (counters("8 of 16"), "engines", "engines 2 (8 of 16) and 1 (8 of 16)"),
        (counters("8 of 16", "9 of 16"), "engines", "9 of 16"),
        ({"interrupted": True}, "end", "B: ended before its time"),
        ({"stopped": "stopped"}, "end", "B: ended before its time"),
    ],
)
def test_what_differs_is_named(changed, kind, told):
    base = BASE | counters("8 of 16", "8 of 16")
    found = confounders(run(row("a"), **base), run(row("a"), **base | changed))
    assert list(found) == [kind]
    assert kind in KINDS
    assert told in found[kind][0]


def test_either_run_whose_engines_knew_its_text_is_refused():
    warm, cold = (run(row("a", cached_tokens=n), **BASE) for n in (100, 40))
    for pair in ((warm, cold), (cold, warm), (warm, warm)):
        assert "had cached this text" in confounders(*pair, names=("x", "y"))["text"][0]
    assert confounders(cold, cold) == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"speedup": 3.0, "time_scale": 3.0},
        {"trace": "moved/t.jsonl", "target": "http://y", "slo_s": {"ttft": 1.0}},
        {"run_id": "other", "client_cpu_s": 3.0},
        {"model": None, "concurrency": None, "plan_digest": None},
        counters("", ""),
        counters("8 of 16", ""),
    ],
)
def test_what_may_differ_or_is_unknown_is_no_reason(changed):
    base = BASE | counters("8 of 16", "8 of 16")
    assert confounders(run(row("a"), **base), run(row("a"), **base | changed)) == {}


def test_two_runs_with_new_words_are_a_pair_whose_outputs_are_not_compared():
    a, b = (run(row("a"), **BASE | {"seed": n, "seed_is_given": False}) for n in (1, 2))
    assert confounders(a, b) == {}
    assert not has_same_text(a, b)
    assert has_same_text(run(row("a"), **BASE), run(row("a"), **BASE))
    assert has_same_text(run(row("a")), run(row("a")))


def test_a_difference_can_be_allowed_by_its_name(tmp_path, capsys):
    a = folder(tmp_path / "a", row("x"))
    b = folder(tmp_path / "b", row("x", cached_tokens=100))
    assert main(["compare", str(a), str(b)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"analyze: no pair: {b}: these engines had cached this text")
    assert error.endswith("(--allow text compares all the same)\n")
    assert main(["compare", str(a), str(b), "--allow", "text"]) == 0
    with pytest.raises(SystemExit) as end:
        main(["compare", str(a), str(b), "--allow", "all"])
    assert end.value.code == 2
    assert "must be of text, trace, seed" in capsys.readouterr().err
