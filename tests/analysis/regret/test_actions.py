"""Names of actions."""

from analysis.regret.actions import Action


def test_actions_have_names() -> None:
    assert Action("a").kind(None) == "place"
    assert Action("a").kind("a") == "colocate"
    assert Action("a").kind("b") == "rehome"
    assert Action("a", "b").kind("a") == Action("a", "b").kind(None) == "offload"
    assert Action("a", "b").kind("b") == "pull"
    assert Action("a", "b").kind("c") == "offload-rehome"
