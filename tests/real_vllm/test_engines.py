"""The engines' own scripts: what cannot be had or started is said, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.measuring.processes import is_running
from tests.real_vllm.engines.fleet import Engine, EngineError, Site, running
from tests.support.harness import until

ENGINES = Path(__file__).parent / "engines"
STARTER = """
import sys, time
from pathlib import Path
from tests.real_vllm.engines.fleet import Template
folder = Path(sys.argv[1])
template = Template(sys.executable, ["timeit"], {})
argv = ["timeit", "-n1", "-r1", "import time; print(7, flush=True); time.sleep(600)"]
print(template.fork(argv, {}, folder, folder / "log").pid, flush=True)
time.sleep(600)
"""


def test_an_engine_that_cannot_start_says_why(site: Site) -> None:
    engine = Engine(site, "bad", "none", ("--no-such-flag",))
    with pytest.raises(EngineError, match="no-such-flag"):
        with running([engine]):
            pass
    assert not engine.is_alive


def test_engines_end_with_whoever_started_them(tmp_path: Path) -> None:
    """Also when that is killed and tidies nothing up."""
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        log = tmp_path / "log"
        asyncio.run(until(lambda: log.exists() and log.read_text() == "7\n", "it runs"))
        starter.kill()
        starter.wait()
        asyncio.run(until(lambda: not is_running(pid), "it has ended"))


def test_packages_that_cannot_be_had_are_a_failure(tmp_path: Path) -> None:
    """No engines, no pass: with one line that says what failed."""
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    python = sys._base_executable  # type: ignore[attr-defined]
    done = subprocess.run(
        [python, str(ENGINES / "install.py"), str(tmp_path / "cache")],
        env=os.environ | nowhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "engines: this failed:" in done.stderr
    assert "No matching distribution found" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "cache" / "venv" / ".installed").exists()
