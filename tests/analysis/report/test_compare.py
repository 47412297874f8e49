"""Two runs side by side."""

import io

from rich.console import Console

from analysis.report.compare import compare, print_comparison
from analysis.runs import LoadedRun, table
from tests.support.runs import row, run


def test_a_comparison_says_what_is_compared_and_which_sign_is_good():
    def loaded(name, policy, scale):
        rows = [row("x", policy=policy)]
        return LoadedRun(name, run(*rows, time_scale=scale), table(rows, scale))

    a, b = loaded("one", "seed-heuristic", 6.0), loaded("two", "never", 3.0)
    result = compare(a, b)
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        print_comparison(result, a, b, console)
    text = captured.get()
    assert "A = one (offload policy seed-heuristic; measured x 6)" in text
    assert "B = two (offload policy never; measured x 3)" in text
    assert "negative: B is faster" in text
    assert "…" not in text
    assert result.differences[0].mean_s == -3.0
