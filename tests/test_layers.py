"""Who may import whom, by walking every module's imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = ("proxy", "replayer", "analysis")
MODULES = sorted(
    path for package in PROJECT for path in (ROOT / package).rglob("*.py") if path.name[0] != "_"
)
IMPURE = {"asyncio", "logging", "os", "random", "socket", "subprocess", "threading", "time"}
CORE_THIRD_PARTY = {"xxhash"}
OURS = "proxy.core"
LEAF = {OURS, "proxy.errors", "proxy.config", "proxy.config_options", "proxy.config_sources"}
LEAF |= {"proxy.config_values", "proxy.clock", "proxy.keys"}
WIRE = LEAF | {"proxy.deadline", "proxy.heads"}
SHELL = WIRE | {
    "proxy.aftermath",
    "proxy.answer",
    "proxy.judge",
    "proxy.tcp",
    "proxy.wire",
    "proxy.pool",
    "proxy.upstream",
    "proxy.relay",
    "proxy.scrape",
    "proxy.metrics",
    "proxy.reqlog",
    "proxy.access",
    "proxy.tls",
    "proxy.resolve",
    "proxy.ways",
}
REQUEST = SHELL | {
    "proxy.handover",
    "proxy.waiting",
    "proxy.service",
    "proxy.waits",
    "proxy.lastwords",
    "proxy.legs",
    "proxy.intake",
    "proxy.replies",
    "proxy.journal",
}
ALLOWED: dict[str, set[str]] = {
    "proxy.errors": {OURS},
    "proxy.clock": set(),
    "proxy.config_values": set(),
    "proxy.build": {OURS},
    "proxy.config_model": {"proxy.config_values", "proxy.keys"},
    "proxy.config_sources": {
        "proxy.build",
        "proxy.config_model",
        "proxy.config_values",
        "proxy.keys",
    },
    "proxy.config_options": {
        *{OURS, "proxy.config_model", "proxy.config_sources", "proxy.config_values"},
        "proxy.keys",
    },
    "proxy.keys": set(),
    "proxy.access": LEAF,
    "proxy.tls": LEAF,
    "proxy.resolve": LEAF | {"proxy.deadline"},
    "proxy.ways": LEAF | {"proxy.resolve"},
    "proxy.allow": WIRE | {"proxy.resolve"},
    "proxy.operators": SHELL | {"proxy.service", "proxy.throttle"},
    "proxy.reload": SHELL | {"proxy.service"},
    "proxy.config": LEAF | {"proxy.config_model"},
    "proxy.deadline": set(),
    "proxy.heads": set(),
    "proxy.answer": LEAF | {"proxy.deadline", "proxy.heads"},
    "proxy.lastwords": set(),
    "proxy.judge": LEAF | {"proxy.answer"},
    "proxy.tcp": set(),
    "proxy.throttle": {OURS},
    "proxy.wire": LEAF | {"proxy.answer", "proxy.tcp"},
    "proxy.pool": WIRE | {"proxy.wire", "proxy.resolve", "proxy.ways"},
    "proxy.upstream": WIRE | {"proxy.answer", "proxy.pool", "proxy.throttle", "proxy.ways"},
    "proxy.scrape": LEAF,
    "proxy.plain": set(),
    "proxy.reqlog": LEAF | {"proxy.plain"},
    "proxy.tally": set(),
    "proxy.metrics": LEAF | {"proxy.build", "proxy.scrape", "proxy.tally"},
    "proxy.relay": WIRE | {"proxy.answer"},
    "proxy.watcher": SHELL,
    "proxy.waiting": LEAF | {"proxy.deadline", "proxy.metrics"},
    "proxy.service": SHELL | {"proxy.watcher", "proxy.waiting", "proxy.memory", "proxy.throttle"},
    "proxy.legs": SHELL | {"proxy.throttle"},
    "proxy.intake": SHELL | {"proxy.legs"},
    "proxy.replies": SHELL,
    "proxy.journal": LEAF,
    "proxy.retrying": SHELL | {"proxy.service"},
    "proxy.whole": LEAF | {"proxy.relay", "proxy.answer"},
    "proxy.race": LEAF,
    "proxy.aftermath": WIRE,
    "proxy.handover": SHELL | {"proxy.service"},
    "proxy.waits": SHELL | {"proxy.service"},
    "proxy.offloading": REQUEST | {"proxy.race"},
    "proxy.streaming": REQUEST,
    "proxy.handler": REQUEST
    | {"proxy.offloading", "proxy.retrying", "proxy.streaming", "proxy.whole"},
    "proxy.memory": set(),
    "proxy.listening": set(),
    "proxy.connections": {"proxy.listening"},
    "proxy.heritage": LEAF,
    "proxy.estate": SHELL | {"proxy.service"},
    "proxy.succession": {"proxy.heritage", "proxy.plain"},
    "proxy.departure": SHELL | {"proxy.service", "proxy.listening"},
    "proxy.supervisor": set(),
    "proxy.background": SHELL | {"proxy.service", "proxy.memory", "proxy.throttle", "proxy.tuning"},
    "proxy.admin": REQUEST | {"proxy.allow", "proxy.operators"},
    "proxy.thresholds": SHELL | {"proxy.service", "proxy.operators"},
    "proxy.refusals": LEAF | {"proxy.throttle"},
    "proxy.edge": LEAF | {"proxy.refusals", "proxy.replies", "proxy.serial"},
    "proxy.serial": set(),
    "proxy.routes": REQUEST
    | {"proxy.admin", "proxy.departure", "proxy.handler", "proxy.operators", "proxy.thresholds"},
    "proxy.app": REQUEST
    | {"proxy.background", "proxy.handler", "proxy.reload", "proxy.routes"}
    | {"proxy.connections", "proxy.listening"}
    | {"proxy.edge", "proxy.refusals", "proxy.tcp"}
    | {"proxy.departure", "proxy.estate", "proxy.heritage", "proxy.succession"},
    "proxy.tuning": set(),
    "proxy.logs": {"proxy.plain"},
    "proxy.cli": LEAF
    | {"proxy.app", "proxy.build", "proxy.edge", "proxy.logs", "proxy.tuning"}
    | {"proxy.heritage", "proxy.supervisor"},
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


VIRTUAL = {name_of(path) for path in MODULES if path.stem.startswith("virtual")}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {name for name in submodules if (ROOT / name.replace(".", "/")).exists()}
            known |= {n for n in submodules if (ROOT / f"{n.replace('.', '/')}.py").exists()}
            found |= known or {node.module}
    return found


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] in PROJECT}


def within(name: str, allowed: set[str]) -> bool:
    return name == "proxy" or any(name == a or name.startswith(f"{a}.") for a in allowed)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_direction_of_imports(path: Path) -> None:
    name = name_of(path)
    if name.startswith(OURS):
        allowed = {OURS}
    elif name.startswith("proxy."):
        allowed = ALLOWED[name]
    elif name == "replayer.cli" or name == "replayer.replay_output":
        allowed = {OURS, "replayer", "analysis"}
    elif name.startswith("replayer."):
        allowed = {OURS, "replayer"}
    elif name.startswith("analysis.check"):
        allowed = {OURS, "analysis", "replayer.arguments", "replayer.sim_cost"} | VIRTUAL
    elif name.startswith(("analysis.cli", "analysis.league", "analysis.rivals", "analysis.regret")):
        allowed = {OURS, "analysis", "replayer.arguments"} | VIRTUAL
    else:
        allowed = {"proxy.core.record", "proxy.core.types", "analysis"}
    wrong = {n for n in ours(path) if not within(n, allowed)}
    assert not wrong, f"{name} must not import {sorted(wrong)}"


CORE = [path for path in MODULES if name_of(path).startswith(OURS)]


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_the_core_is_pure(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)} - {"proxy"}
    assert not tops & IMPURE
    assert tops - CORE_THIRD_PARTY <= sys.stdlib_module_names


def test_nothing_in_the_core_imports_the_router() -> None:
    users = {name_of(p) for p in CORE if "proxy.core.router" in imports(p)}
    assert not users


@pytest.mark.parametrize("heavy", ["pandas", "plotly", "pydantic"])
def test_the_proxy_stays_light(heavy: str) -> None:
    for path in MODULES:
        if name_of(path).startswith(("proxy.", "replayer.")):
            assert heavy not in {name.split(".")[0] for name in imports(path)}, name_of(path)


def test_a_proxy_that_serves_has_not_loaded_what_it_never_needs() -> None:
    """Each of these is a megabyte or more for as long as it runs."""
    told = "import sys, proxy.cli; print(*sys.modules)"
    command = [sys.executable, "-P", "-c", told]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    tops = set(run.stdout.split())
    assert "proxy.app" in tops
    assert not tops & {"pydantic", "pandas", "importlib.metadata", "zipfile", "sysconfig"}


def test_nothing_interpreted_inherits_from_what_is_compiled() -> None:
    setup = ast.parse((ROOT / "setup.py").read_text("utf-8"))
    [kept] = [
        node.value
        for node in setup.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INTERPRETED"
    ]
    assert isinstance(kept, ast.Call)
    interpreted = {"proxy.core." + name[:-3] for name in ast.literal_eval(kept.args[0])}
    compiled = {name_of(p) for p in MODULES if p.parent == ROOT / "proxy" / "core"} - interpreted
    for path in MODULES:
        if name_of(path) not in compiled:
            bases = dict(_bases(ast.parse(path.read_text("utf-8"))))
            assert compiled.isdisjoint(bases), f"{name_of(path)}: {bases}"


def _bases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Where each imported base class comes from, and who inherits from it."""
    nodes = list(ast.walk(tree))
    origin = {
        alias.asname or alias.name: node.module or ""
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                yield origin.get(ast.unparse(base), ""), node.name
