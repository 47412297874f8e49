"""What is declared of each option agrees with the code that uses it."""

from typing import get_args

import pytest

from proxy.config.load import load, option_tables
from proxy.config.options import Settings
from proxy.config.sources import flag_of
from proxy.core.connectors import CONNECTORS
from proxy.core.placement.policies import POLICIES
from proxy.core.placement.rules import PLACEMENTS


def test_words_allowed_are_those_of_the_registries():
    for name, registry in (
        ("placement", PLACEMENTS),
        ("offload_policy", POLICIES),
        ("kv_connector", CONNECTORS),
    ):
        assert get_args(Settings.model_fields[name].kind) == tuple(registry)


def test_help_and_table_describe_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        load(["--help"], {})
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    shown = " ".join(printed.split())
    assert printed.index("\n  check: ask every instance once") < printed.index("--help")
    table = option_tables()
    for name in Settings.model_fields:
        assert flag_of(name) in shown
        assert flag_of(name)[2:] in table
    assert "[tokens; integer, >= 0, <= 1000000000000; default 1500]" in shown
    assert "Timeouts:" in shown
    assert "| `--max-body-bytes` | `32MiB` | bytes |" in table
