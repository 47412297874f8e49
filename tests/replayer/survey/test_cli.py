"""The first word of `replay`: a command about a trace's file, or a trace."""

import sys

import pytest

from replayer.replay.__main__ import main
from replayer.survey.cli import COMMANDS
from tests.support.traces import SAMPLE, write


@pytest.fixture
def replay(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["replay", *arguments])
        try:
            return main(), capsys.readouterr()
        except SystemExit as ended:
            return ended.code, capsys.readouterr()

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_needs(replay, name):
    status, told = replay(name)
    assert status == 2
    assert told.err.startswith(f"replay {name}: the following arguments are required: trace")
    assert replay(name, "--help")[1].out.startswith(f"usage: replay {name} ")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_trace_with_a_commands_name_is_given_with_its_folder(replay, name, tmp_path):
    write(tmp_path / name, b"no row")
    status, told = replay(f"./{name}")
    assert status == 2
    assert told.err.startswith(f"replay: {name}:1: line: must be one JSON object")


def test_a_trace_is_replayed_as_before(replay):
    status, told = replay(str(SAMPLE), "--target", "http://127.0.0.1:9", "--no-progress")
    assert status == 2
    assert "127.0.0.1:9" in told.err


def test_what_ends_a_command_is_no_traceback(replay, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("replayer.survey.validate.read_trace", interrupted)
    assert replay("validate", str(SAMPLE))[0] == 130
