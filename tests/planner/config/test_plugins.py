"""Plugins of the configuration: their defaults, where they may be, and what is wrong in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.core.pipeline import Remote
from planner.core.types import Stage
from proxy.config.sources import ConfigError
from tests.planner.config.test_load import loaded

TOML = """
proxies = ["p:1"]

[[plugin]]
name = "cap"
stage = "constrain"
address = "127.0.0.1:9300"

[[plugin]]
name = "sale"
stage = "predict"
address = "plans.example:9300"
priority = 7
interval_seconds = 60
hold_policy = "hold_last"
deadline_seconds = 2.5
token = "@{folder}/token"
"""


def test_plugins_are_tables_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    path = tmp_path / "plan.toml"
    path.write_text(TOML.format(folder=tmp_path))
    cap, sale = loaded(str(path)).options.plugins
    assert cap.remote == Remote("cap", Stage.CONSTRAIN, 50)
    assert (cap.deadline_seconds, cap.token) == (1.0, None)
    assert sale.remote == Remote("sale", Stage.PREDICT, 7, 60.0, holds=True)
    assert sale.token is not None
    assert (sale.token.get_secret_value(), sale.deadline_seconds) == ("s3cret", 2.5)


def test_a_flag_has_them_as_json() -> None:
    text = '{"name": "cap", "stage": "constrain", "address": "[::1]:9300"}'
    for given in (text, f"[{text}]"):
        (cap,) = loaded("--proxies", "p:1", "--plugin", given).options.plugins
        assert cap.address == "[::1]:9300"


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("3", "it is no list of tables"),
        ("[1]", "it is no list of tables"),
        ("[" + ",".join(["{}"] * 17) + "]", "at most 16"),
        ("{}", "'without a name', name: it is not given"),
        ('{"name": 5}', "'5', name: a name"),
        ('{"name": "builtin_load_propose"}', "not a name"),
        ('{"name": "a b"}', "not a name"),
        ('{"name": "x", "self": 1}', "'x' has an unknown key 'self'; there are name, stage"),
        ('{"name": "x", "stage": "execute"}', "'x', stage: one of predict, propose"),
        ('{"name": "x", "stage": ["propose"]}', "'x', stage: one of predict, propose"),
        ('{"name": "x", "stage": "propose"}', "'x', address: it is not given; HOST:PORT"),
        *(
            (f'{{"name": "x", "stage": "propose", "address": {address}}}', "'x', address: ")
            for address in (
                '"unix:/x"',
                '"h"',
                '"h:0"',
                '"h:65536"',
                '"http://h:1"',
                "1",
                '"h:1\\n"',
            )
        ),
        *(
            (f'{{"name": "x", "stage": "propose", "address": "127.0.0.1:1", {more}}}', why)
            for more, why in (
                ('"priority": -1', "'x', priority: integer, >= 0"),
                ('"interval_seconds": "nan"', "'x', interval_seconds: number, >= 0"),
                ('"deadline_seconds": 0', "'x', deadline_seconds: number, > 0"),
                ('"deadline_seconds": 3.5', "at most 3, a tenth of tick_max_duration_seconds"),
                ('"hold_policy": "never"', "'x', hold_policy: one of accept_when_idle, hold_last"),
                ('"token": "@/not/there"', "'x', token: cannot read the file it names"),
                ('"token": "s3cret\\nx"', "'x', token: it is not one line"),
            )
        ),
        (
            '{"name": "x", "stage": "propose", "address": "10.0.0.1:1"}',
            "'x', token: 10.0.0.1:1 is not loopback, so it is needed",
        ),
        (
            '[{"name": "x", "stage": "propose", "address": "127.0.0.1:1"},'
            ' {"name": "x", "stage": "propose", "address": "127.0.0.1:2"}]',
            "'x' is given twice",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line(table: str, why: str) -> None:
    for words in (
        (f'{{"proxies": "p:1", "plugin": {table}}}',),
        ("--proxies", "p:1", "--plugin", table),
    ):
        with pytest.raises(ConfigError) as caught:
            loaded(*words)
        said = str(caught.value)
        assert said.startswith("plugin (")
        assert why in said
        assert "\n" not in said
        assert "s3cret" not in said
