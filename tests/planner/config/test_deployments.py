"""Several deployments in one configuration: what each has, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from planner import cli
from planner.config.deployments import MOST_DEPLOYMENTS, load_all
from planner.config.load import load
from proxy.config.sources import ConfigError

PLAN = """
max_gpu_budget = 12
advisory = false
ttft_ms = 800
state_file = "/var/lib/planner/state.json"

[[deployment]]
name = "chat"
proxies = ["10.0.0.5:8000", "10.0.0.6:8000"]
min_endpoint = 2
weight = 3
scaler = "exec"
scaler_command = "./fleet"
match = "chat-*"

[[deployment]]
name = "code"
proxies = "10.0.1.5:8000"
gpus_per_replica = 4
ttft_ms = 2000
scaler = "exec"
scaler_command = "./fleet"
match = "code-*"
control = "127.0.0.1:9999"
audit_log = "code.jsonl"
"""


def test_a_table_is_over_what_is_in_common_and_a_flag_over_both(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    (chat, code), warnings = load_all({"config": str(path), "itl_ms": "30"})
    assert warnings == ()
    assert (chat.name, chat.weight, chat.options.min_endpoint) == ("chat", 3.0, 2)
    assert (code.name, code.weight, code.options.min_endpoint) == ("code", 1.0, 1)
    assert [one.options.ttft_ms for one in (chat, code)] == [800.0, 2000.0]
    assert [one.options.itl_ms for one in (chat, code)] == [30.0, 30.0]
    assert [one.options.max_gpu_budget for one in (chat, code)] == [12, 12]
    assert chat.options.proxies == ("http://10.0.0.5:8000", "http://10.0.0.6:8000")


def test_each_has_its_own_listener_and_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    (chat, code), _ = load_all({"config": str(path), "report_file": "out/plan.html"})
    assert [one.options.control for one in (chat, code)] == ["127.0.0.1:9180", "127.0.0.1:9999"]
    states = [str(one.options.state_file) for one in (chat, code)]
    assert states == ["/var/lib/planner/chat.state.json", "/var/lib/planner/code.state.json"]
    assert [one.options.audit_log for one in (chat, code)] == [None, Path("code.jsonl")]
    reports = [str(one.options.report_file) for one in (chat, code)]
    assert reports == ["out/chat.plan.html", "out/code.plan.html"]
    (_, third), _ = load_all({"config": text(own({}), own({"name": "b", "proxies": "b:1"}))})
    assert third.options.control == "127.0.0.1:9181"
    assert str(third.options.state_file) == "b.cache-planner.state.json"


def own(more: dict[str, Any]) -> dict[str, Any]:
    return {"name": "a", "proxies": "a:1"} | more


def text(*tables: Any, **common: Any) -> str:
    return orjson.dumps({"deployment": list(tables)} | common).decode()


OTHER = own({"name": "b", "proxies": "b:1"})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (text(), "deployment in the JSON object: 1 to 16 tables"),
        ('{"deployment": {"name": "a"}}', "1 to 16 tables"),
        ('{"deployment": ["a"]}', "1 to 16 tables"),
        (text(*[own({})] * (MOST_DEPLOYMENTS + 1)), "1 to 16 tables"),
        (text({"proxies": "a:1"}), "name of a deployment in the JSON object = 'None': letters"),
        (text(own({"name": "a b"})), "= 'a b': letters, digits"),
        (text(own({"name": 3})), "= '3': letters, digits"),
        (text(own({}), own({})), "deployment a in the JSON object: it is given twice"),
        (
            text(own({"weight": 0})),
            "weight of deployment a in the JSON object = '0': a number, > 0",
        ),
        (text(own({"weight": True})), "= 'True': a number"),
        (text(own({"weight": "3"})), "= '3': a number"),
        (text(own({"weight": 1e7})), "= '10000000.0': a number"),
        (text(own({"max_gpu_budget": 3})), "max_gpu_budget in deployment a in the JSON object: it"),
        (text(own({"advisory": False})), "advisory in deployment a in"),
        (text(own({"min_endpont": 3})), "unknown key 'min_endpont' in deployment a in the JSON"),
        (text(own({"deployment": []})), "unknown key 'deployment' in deployment a"),
        (text({"name": "a"}), "deployment a: proxies: "),
        (text(own({"ttft_ms": -1})), "deployment a: ttft_ms = '-1' (deployment a in the JSON"),
        (text(own({}), own({"name": "b"})), "deployment b in the JSON object: proxy http://a:1 is"),
        (text(own({"control": "127.0.0.1:9181"}), OTHER), "control 127.0.0.1:9181 is that of a"),
        (text(own({"audit_log": "b.x"}), OTHER, audit_log="x"), "audit_log b.x is that of a, too"),
        (
            text(own({}), OTHER, scaler="exec", scaler_command="./fleet", match="x-*"),
            "scaler_command ./fleet with match x-* is that of a, too",
        ),
        (
            text(own({}), OTHER, scaler="kubernetes", kubernetes_object="deployment/vllm"),
            "kubernetes_object /deployment/vllm is that of a, too",
        ),
        (
            text(own({"min_endpoint": 5}), OTHER | {"gpus_per_replica": 4}),
            "max_gpu_budget = 8: min_endpoint and gpus_per_replica of all deployments need 9 at",
        ),
    ],
)
@pytest.mark.parametrize("command", ["run", "validate"])
def test_what_is_wrong_is_a_line(
    capsys: pytest.CaptureFixture[str], config: str, why: str, command: str
) -> None:
    assert cli.main([command, config]) == 2
    err = capsys.readouterr().err
    assert why in err
    assert err.startswith("cache-planner: ")
    assert err.count("\n") == 1


def test_a_command_that_takes_one_says_so() -> None:
    with pytest.raises(ConfigError, match="has several deployments: only run and validate"):
        load({"config": text(own({}))})


def test_a_password_in_an_address_is_not_shown() -> None:
    secret = {"proxies": "http://u:s3cret@a:1"}
    with pytest.raises(ConfigError) as caught:
        load_all({"config": text(own(secret), OTHER | secret)})
    assert "s3cret" not in str(caught.value)
