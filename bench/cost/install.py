"""Peers from PyPI, each in an environment of its own: their dependencies are not ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.measuring.peers import Peer, venv_of

PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def install(peers: Iterable[Peer], venvs: Path, say: Callable[[str], None]) -> None:
    """Install what is not there; one that cannot be had is said and left out."""
    wanted = {p.requirement: venv_of(p, venvs) for p in peers if p.requirement is not None}
    for requirement, venv in wanted.items():
        done = venv / ".installed"
        if done.exists() and done.read_text() == requirement:
            continue
        say(f"installing {requirement} into {venv}")
        try:
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
            subprocess.run([str(venv / "bin" / "python"), *PIP, str(requirement)], check=True)
        except subprocess.CalledProcessError as error:
            say(f"{requirement} cannot be installed: {error}")
        else:
            done.write_text(str(requirement))
