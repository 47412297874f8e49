"""The agents of package.json, from npm into .cache/clients."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WANTED = Path(__file__).with_name("package.json")
AGENTS = ROOT / ".cache" / "clients"
INSTALL_S = 600.0
_TRIED = "from tests.clients import namespace; namespace.enter()"


def prepared() -> int | None:
    """Install what is missing. The status to end with where no agent can run, with a word why."""
    npm = shutil.which("npm")
    if npm is None:
        return _skipped("there is no npm")
    tried = subprocess.run(
        [sys.executable, "-c", _TRIED], cwd=ROOT, capture_output=True, check=False
    )
    if tried.returncode != 0:
        return _skipped("a process may not have a network of its own here")
    stamp = AGENTS / ".installed"
    if not stamp.is_file() or stamp.read_bytes() != WANTED.read_bytes():
        try:
            _install(npm)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"test-clients: {error}", file=sys.stderr)
            return 1
        shutil.copy(WANTED, stamp)
    return None


def _skipped(why: str) -> int:
    print(f"test-clients: skipped: {why}")
    return 0


def _install(npm: str) -> None:
    print(f"test-clients: npm installs agents into {AGENTS} (a minute, 1.5 GB)", flush=True)
    shutil.rmtree(AGENTS, ignore_errors=True)
    AGENTS.mkdir(parents=True)
    shutil.copy(WANTED, AGENTS)
    command = [npm, "install", "--no-fund", "--no-audit", "--no-package-lock", "--loglevel=error"]
    subprocess.run(command, cwd=AGENTS, check=True, timeout=INSTALL_S)
