"""Names of actions."""

from analysis.regret.actions import Action, action_of, actions
from proxy.core.placement.rules import ruled
from tests.support.scenes import candidate, scene_of


def test_actions_have_names() -> None:
    assert Action("a").kind(None) == "place"
    assert Action("a").kind("a") == "colocate"
    assert Action("a").kind("b") == "rehome"
    assert Action("a", "b").kind("a") == Action("a", "b").kind(None) == "offload"
    assert Action("a", "b").kind("b") == "pull"
    assert Action("a", "b").kind("c") == "offload-rehome"


def test_an_oracle_of_places_tries_no_offload() -> None:
    scene = scene_of(candidate("a", decode_tokens=9), candidate("b"), candidate("c"), home="a")
    own = ruled("always")(scene)
    places = actions(scene, own, offloads=False)
    assert places == [action_of(own), Action("a"), Action("b"), Action("c")]
    assert set(places) < set(actions(scene, own))
