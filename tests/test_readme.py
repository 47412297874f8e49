"""What the README shows is run: every command of it, its answer's headers, and its figures."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from replayer.demo.processes import Children

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS, HEADERS = BLOCKS
PROSE = re.sub(r"^```.*?^```|`[^`\n]*`", "", README, flags=re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"(?<!Python )(?<![\w./])\b\d+\.\d{2,}|\b\d+,\d{3}")
RUN = {
    "python3 -m venv venv": "tests/install/test_wheel.py",
    ". venv/bin/activate": "tests/install/test_wheel.py",
    "pip install -c constraints.txt .": "tests/install/test_wheel.py",
    "cache-proxy --instances 10.0.0.1,10.0.0.2": "tests/test_readme.py",
    "curl -i http://127.0.0.1:8000/v1/chat/completions": "tests/test_readme.py",
    "engine-sim --port 8001 --instances 2": "tests/test_readme.py",
    "make demo": "tests/test_demo.py",
    ".venv/bin/python -m replayer.demo --engines 2": "tests/test_demo.py",
    "make test": "Makefile",
}
"""Each command of the README, and the file that runs it."""


def shown() -> list[str]:
    """The commands of the README: those of its first block, and those named in its text."""
    lines = COMMANDS.replace("\\\n", " ").splitlines()
    block = [part.strip() for line in lines for part in line.split(" && ")]
    return [*block, *re.findall(r"`((?:make|engine-sim|\.venv/bin/python) [^`]+)`", README)]


def test_every_command_is_run_by_a_test() -> None:
    commands = shown()
    assert {next((key for key in RUN if one.startswith(key)), one) for one in commands} == set(RUN)
    assert all((ROOT / path).is_file() for path in RUN.values())
    targets = (ROOT / "Makefile").read_text("utf-8")
    assert "\ndemo: " in targets
    assert "-m replayer.demo\n" in targets


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[Children, list[str]]]:
    """The README's two simulated servers, and who stops what is started beside them."""
    (command,) = (one for one in shown() if one.startswith("engine-sim "))
    flags = command.replace("8001", "0").removesuffix(" &").split()[1:]
    children = Children()
    with children.stopped_at_the_end():
        own = ("--bootstrap-port", "0")
        sim = children.start("sim", tmp_path / "sim", "replayer.simulator.cli", *flags, *own)
        found = [sim.wait_for(rf"engine {i} http://(\S+) bootstrap")[1] for i in range(2)]
        yield children, found


@pytest.mark.long
def test_start_and_ask_as_the_readme_says(
    tmp_path: Path, engines: tuple[Children, list[str]]
) -> None:
    children, addresses = engines
    _, start, ask = COMMANDS.replace("\\\n", " ").splitlines()
    program, *flags = shlex.split(start.replace("10.0.0.1,10.0.0.2", ",".join(addresses)))
    assert program == "cache-proxy"
    own = ("--host", "127.0.0.1", "--port", "0")
    proxy = children.start("proxy", tmp_path / "proxy", "proxy.cli", *flags, *own)
    port = proxy.wait_for(r"listening on http://127.0.0.1:(\d+)")[1]
    words = shlex.split(ask.replace(":8000", f":{port}").replace("YOUR-MODEL", "sim-8b"))
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    answer = dict(line.split(": ", 1) for line in done.stdout.splitlines()[1:] if ": " in line)
    promised = dict(line.split(": ", 1) for line in HEADERS.splitlines())
    assert promised.keys() <= answer.keys()
    assert answer["X-Cache-Proxy-Instance"] in addresses
    assert answer["X-Cache-Proxy-Route"] == promised["X-Cache-Proxy-Route"]
    # The length of the prompt is estimated from the body, so the model's name counts.
    reasons = [re.sub(r"of \d+", "of N", one["X-Cache-Proxy-Reason"]) for one in (answer, promised)]
    assert reasons[0] == reasons[1]


def test_every_figure_is_in_a_runs_json() -> None:
    runs = orjson.loads((ROOT / "docs/benchmarks/routing.json").read_bytes())["comparisons"]
    ratios = [
        ratio["median"] for run in runs for ratio in run["ratios"] if ratio["figure"] == "TTFT mean"
    ]
    decision = orjson.loads((ROOT / "docs/try/decision.json").read_bytes())
    priced = [one["ttft_s"] for one in decision["candidates"]]
    known = {f"{number:.2f}" for number in ratios} | {f"{number:g}" for number in priced}
    known |= {f"{decision[name]:,}" for name in ("isl_tokens", "hit_tokens")}
    figures = FIGURE.findall(PROSE)
    assert len(figures) >= 8
    assert set(figures) <= known
