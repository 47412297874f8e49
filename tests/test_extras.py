"""The proxy and engine-sim need no package of the extra `replay`; what does need them says so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from replayer.arguments import REPORTS_NEED
from tests.test_layers import PATHS, imported

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OF_ANOTHER = {
    "multidict": "aiohttp",
    "markupsafe": "jinja2",
    "compression": "backports",
    "grpc": "grpcio",
    "google": "protobuf",
    "opentelemetry": "opentelemetry_sdk",
    "urllib3": "requests",
}
"""Packages that come with another one, as parts of what that one takes and returns, or by another
name. `compression` is Python's from 3.14 on, and the backport's before."""


def packages(requirements: list[str]) -> set[str]:
    names = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in requirements}
    return names - {"cache_proxy"}


NEEDED = packages(PROJECT["dependencies"])
EXTRA = packages(PROJECT["optional-dependencies"]["replay"])
OTEL = packages(PROJECT["optional-dependencies"]["otel"])
SHARE = packages(PROJECT["optional-dependencies"]["share"])
PLUGINS = packages(PROJECT["optional-dependencies"]["planner-grpc"])


@pytest.mark.long
def test_an_installation_without_the_extra_has_what_the_proxy_and_engine_sim_import() -> None:
    alone = ("proxy.", "replayer.arguments", "replayer.engine", "replayer.simulator")
    for name in PATHS:
        tops = {module.split(".")[0] for module in imported(name)} - sys.stdlib_module_names
        others = {
            OF_ANOTHER.get(top, top) for top in tops - {"proxy", "replayer", "analysis", "planner"}
        }
        allowed = NEEDED if name.startswith(alone) else NEEDED | EXTRA
        if name.startswith("planner.plugin_api."):
            allowed = allowed | PLUGINS
        if name == "proxy.net.bus.redis":
            allowed = allowed | SHARE
        if name.startswith("proxy.telemetry.tracing."):
            allowed = allowed | OTEL
        assert others <= allowed, name
    assert set(REPORTS_NEED) == EXTRA
    assert not NEEDED & {"pandas", "numpy", "plotly"}


WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(%r))
for module, *arguments in %r:
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        print(module, end.code, flush=True)
"""
"""A module that is None in sys.modules is one that is not installed."""


@pytest.mark.long
def test_what_is_not_installed_is_named_in_one_line_before_anything_is_sent() -> None:
    runs = (
        ("proxy.cli", "--version"),
        ("replayer.simulator.cli", "--port", "-1"),
        ("replayer.replay", "no.jsonl"),
        ("analysis.cli", "report", "."),
        ("replayer.demo",),
    )
    command = [sys.executable, "-P", "-c", WITHOUT % (sorted(EXTRA), runs)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ends = [line.rpartition(" ")[::2] for line in run.stdout.splitlines() if line[-1].isdigit()]
    statuses = (0, 2, 2, 2, 1)
    assert [(of.split()[0], status) for of, status in ends] == [
        (module, str(status)) for (module, *_), status in zip(runs, statuses, strict=True)
    ]
    said = [line for line in (run.stdout + run.stderr).splitlines() if "not installed" in line]
    told = (
        f"not installed: {', '.join(REPORTS_NEED)}; run pip install -c constraints.txt '.[replay]'"
    )
    assert len(said) == 3
    assert all(told in line for line in said)
    assert "Traceback" not in run.stderr


def test_tracing_without_its_extra_is_refused_in_one_line() -> None:
    options = "--instances", "127.0.0.1:1", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:1"
    code = WITHOUT % (["opentelemetry"], (("proxy.cli", *options),))
    command, at = [sys.executable, "-P", "-c", code], {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=at, capture_output=True, text=True, check=True)
    assert run.stdout == "proxy.cli 2\n"
    needs = "needs packages of OpenTelemetry: pip install 'cache-proxy[otel]'"
    assert run.stderr == f"cache-proxy: otlp_endpoint: {needs}\n"


def test_the_entry_points_are_there() -> None:
    for target in PROJECT["scripts"].values():
        module, _, function = target.partition(":")
        tree = ast.parse(PATHS[module].read_text("utf-8"))
        assert any(isinstance(n, ast.FunctionDef) and n.name == function for n in tree.body)
