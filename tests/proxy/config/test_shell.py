"""Completion scripts and the man page: made from the options, run where the shell is here."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.config.files import file_names
from proxy.config.options import Settings
from proxy.config.shell import SHELLS, Command, Flag, completion, man_page
from proxy.config.sources import flag_of

KNOWN = {flag_of(name) for name in Settings.model_fields} | {"--man", "--version", "--completion"}
SMALL = Command(
    "a-b",
    "a-b 1.0",
    "Serve it's files.",
    "a-b [options]",
    {"check": "look, and exit"},
    {
        "Files": [
            Flag("--file", "The file; none: no file.", "PATH", is_path=True),
            Flag("--kind", "'Kind' of [it]: any. More.", "KIND", ("one", "two")),
            Flag("--count", "How many.", "N"),
            Flag("--all", "All of them."),
        ]
    },
    {"Notes": ".first\nback\\slash"},
)


def printed(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(given)
    return capsys.readouterr().out


def offered(script: str, *words: str, folder: Path | None = None) -> list[str]:
    """The words that bash offers for the last of these."""
    asks = (
        f"{script}\n"
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()\n'
        "$(complete -p \"$1\" | sed 's/.*-F \\([^ ]*\\) .*/\\1/')\n"
        '[[ ${#COMPREPLY[@]} == 0 ]] || printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "--norc", "-c", asks, "bash", *words]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    assert run.stderr == ""
    return run.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_offers_flags_their_values_and_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = printed(capsys, "--completion", "bash")
    assert set(offered(script, "cache-proxy", "--")) >= KNOWN
    assert offered(script, "cache-proxy", "--log-l") == ["--log-level"]
    assert offered(script, "cache-proxy", "c") == ["check"]
    assert offered(script, "cache-proxy", "check", "ch") == []
    levels = ["debug", "info", "warning", "error"]
    assert offered(script, "cache-proxy", "--log-level", "") == levels
    assert offered(script, "cache-proxy", "--log-level", "=") == levels
    assert offered(script, "cache-proxy", "--log-level", "=", "d") == ["debug"]
    assert offered(script, "cache-proxy", "--port", "") == []
    assert offered(script, "cache-proxy", "--print-file", "proxy") == ["proxy.toml"]
    (tmp_path / "my.toml").touch()
    assert offered(script, "cache-proxy", "--config", "m", folder=tmp_path) == ["my.toml"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_take_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(capsys, "--completion", shell)
    long = {f"--{name}" for name in re.findall(r"(?:-l |--)([a-z0-9-]+)", script)}
    assert long >= KNOWN
    assert all(name in script for name in file_names())
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_an_unknown_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "tcsh"]) == 2
    error = capsys.readouterr().err
    assert "tcsh" in error
    assert error.count("\n") == 1


def test_each_kind_of_flag_in_each_shell() -> None:
    fish, zsh = completion(SMALL, "fish").splitlines(), completion(SMALL, "zsh")
    assert fish[1:] == [
        "complete -c a-b -f",
        "complete -c a-b -n __fish_use_subcommand -a check -d 'look, and exit'",
        "complete -c a-b -l file -d 'The file' -r -F",
        "complete -c a-b -l kind -d '\\'Kind\\' of [it]: any' -x -a 'one two'",
        "complete -c a-b -l count -d 'How many' -x",
        "complete -c a-b -l all -d 'All of them'",
    ]
    assert "'--file=[The file]:PATH:_files'" in zsh
    assert "'--kind=['\\''Kind'\\'' of \\[it\\]\\: any]:KIND:(one two)'" in zsh
    assert "'--all[All of them]'" in zsh
    assert "'1:command:(check)'" in zsh
    if shutil.which("bash"):
        assert offered(completion(SMALL, "bash"), "a-b", "--kind", "t") == ["two"]
    assert {*SHELLS} == {"bash", "zsh", "fish"}


def test_the_man_page_has_every_option_and_no_accidental_request() -> None:
    page = man_page(SMALL)
    assert page.startswith('.TH A\\-B 1 "" "a\\-b 1.0"\n.SH NAME\na\\-b \\- Serve it\'s files\n')
    assert "\\fB\\-\\-kind\\fR \\fIKIND\\fR\n\\&'Kind' of [it]: any. More.\n" in page
    assert page.endswith(".SH NOTES\n.PP\n\\&.first\n.PP\nback\\eslash\n")


def test_man_shows_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = printed(capsys, "--man")
    plain = page.replace("\\-", "-")
    assert all(f"\\fB{flag}\\fR" in plain for flag in KNOWN)
    path = tmp_path / "cache-proxy.1"
    path.write_text(page, "utf-8")
    if shutil.which("man"):
        command = ["man", "--warnings", "-E", "UTF-8", "-l", str(path)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert run.stderr == ""
        assert "EXIT STATUS" in run.stdout
