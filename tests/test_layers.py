"""Who may import whom: one list of directions, checked against every module's imports."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIRECTIONS = {
    "proxy": "cli | app | request, admin, process | state | fleet | net.upstream, net.server"
    " | telemetry | net | protocol | config | core",
    "proxy.core": "routing | placement, sharing | known | admission, fleet | accounts"
    " | kvcache, connectors | latency, thermal | types",
    "replayer": "replay.__main__, demo, virtual | survey | replay, simulator"
    " | engine, loads, trace, answers, arguments, terminal",
    "analysis": "cli | regret, elastic, plan | check, league, report, thermal"
    " | rivals, runs | bench | measures",
    "planner": "cli | dry_run | service | control | run | telemetry, sources, profiling, plugin_api"
    " | scalers | config | core",
    "planner.core": "memory | builtin | propose, predict.plugin | pipeline, state | merge, rules"
    " | budget, perf, propose.static | observe | predict, types",
}
"""A part imports only from parts on its right, behind a bar; never from a neighbour at a comma."""
BETWEEN = {
    "proxy": (),
    "replayer": ("proxy.core",),
    "analysis": (
        "proxy.core",
        *("replayer.virtual", "replayer.engine", "replayer.trace", "replayer.arguments"),
        *("replayer.loads", "replayer.terminal", "planner.core", "planner.sources"),
    ),
    "planner": (
        *("proxy.core", "proxy.config"),
        *("proxy.net.peer_documents", "proxy.net.server", "proxy.net.tls"),
        *("replayer.virtual", "replayer.engine", "replayer.trace", "replayer.arguments"),
        *("replayer.answers", "replayer.terminal", "replayer.replay.client"),
        *("replayer.replay.options", "replayer.replay.prompts"),
    ),
}
"""What the packages may import of each other."""
EXCEPTIONS = {
    "replayer.replay.cli": ("analysis.report", "analysis.runs"),
    "replayer.replay.__main__": ("analysis.cli",),
    "replayer.arguments": ("proxy",),
}
"""The replayer's commands call the report and `what-if`, lazily. All commands have one version."""
MOST_ENTRIES = 12
"""Modules and packages in one folder."""
MOST_CHAINED = 12
"""Modules on the longest chain of imports: a command of `analysis` down to `core.types`."""
IMPURE = {"asyncio", "logging", "os", "random", "socket", "subprocess", "threading", "time"}
PURE_THIRD_PARTY = {
    "proxy.core": {"xxhash"},
    "proxy.protocol": {"xxhash", "orjson", "multidict"},
    "planner.core": {"numpy", "scipy"},
}
"""The pure packages, and what they import beside the standard library."""


def name_of(path: Path) -> str:
    """The dotted name of a module; of a package, for its `__init__`."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


PATHS = {name_of(path): path for top in BETWEEN for path in sorted((ROOT / top).rglob("*.py"))}


@cache
def tree(name: str) -> ast.Module:
    """Looked through for garbage again and again, it would take four times as long to make."""
    gc.disable()
    try:
        return ast.parse(PATHS[name].read_text("utf-8"))
    finally:
        gc.enable()


def statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every statement, within others too: a tenth of all nodes, and imports are among them."""
    for node in body:
        yield node
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            yield from statements(getattr(node, field, ()))


@cache
def imported(name: str) -> frozenset[str]:
    """Every module that a module names in an import, wherever in it that stands."""
    found: set[str] = set()
    for node in statements(tree(name).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{name}: a relative import"
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & PATHS.keys()
            found |= modules or {node.module}
    return frozenset(found)


@cache
def ours(name: str) -> frozenset[str]:
    """The project's own modules among them."""
    return frozenset(n for n in imported(name) if n.split(".")[0] in BETWEEN)


def _ranks(directions: str) -> dict[str, int]:
    rows = directions.split("|")
    return {part.strip(): rank for rank, row in enumerate(rows) for part in row.split(",")}


def _part(name: str, parent: str, ranks: dict[str, int]) -> str | None:
    """The part of `parent` that a module belongs to: the longest that is listed."""
    words = name.removeprefix(parent + ".").split(".")
    return next((p for n in (2, 1) if (p := ".".join(words[:n])) in ranks), None)


def _is_wrong(importer: str, module: str, parent: str) -> bool:
    ranks = _ranks(DIRECTIONS[parent])
    mine, other = _part(importer, parent, ranks), _part(module, parent, ranks)
    if mine is None or other is None:
        return module != parent and importer != parent
    return mine != other and ranks[mine] >= ranks[other]


def _may_import(name: str, module: str) -> bool:
    top, where = name.split(".")[0], module.split(".")[0]
    if where != top:
        allowed = (*BETWEEN[top], *EXCEPTIONS.get(name, ()))
        return f"{module}.".startswith(tuple(f"{a}." for a in allowed))
    parents = [p for p in DIRECTIONS if all(f"{n}.".startswith(f"{p}.") for n in (name, module))]
    return not any(_is_wrong(name, module, p) for p in parents)


def test_direction_of_imports() -> None:
    """One test for all modules: each worker that had one of hundreds would parse them all."""
    wrong = [(n, module) for n in PATHS for module in ours(n) if not _may_import(n, module)]
    assert not wrong, "who imports what it may not"


def test_core_and_protocol_import_no_other_part_of_the_proxy() -> None:
    allowed: dict[str, tuple[str, ...]] = {"proxy.core.": ("proxy.core.",)}
    allowed["proxy.protocol."] = ("proxy.protocol.", "proxy.core.types.", "proxy.core.connectors.")
    for name in PATHS:
        for part, of in allowed.items():
            if f"{name}.".startswith(part):
                wrong = {n for n in ours(name) if not f"{n}.".startswith(of)}
                assert not wrong, f"{name}: {wrong}"


def _impure(name: str) -> set[str]:
    tops = {module.split(".")[0] for module in imported(name)} - {name.split(".")[0]}
    third_party = PURE_THIRD_PARTY[".".join(name.split(".")[:2])]
    return tops & IMPURE | tops - third_party - sys.stdlib_module_names


def test_the_cores_are_pure() -> None:
    pure = [n for n in PATHS if f"{n}.".startswith(tuple(f"{p}." for p in PURE_THIRD_PARTY))]
    assert not {n: found for n in pure if (found := _impure(n))}


def _router_methods() -> set[str]:
    module = tree("proxy.core.routing.router").body
    router = next(n for n in module if isinstance(n, ast.ClassDef) and n.name == "Router")
    return {n.name for n in router.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"}


@pytest.mark.long
def test_nobody_reaches_through_the_router_to_a_part() -> None:
    """Its own methods are called, and its `known` is taken whole; parts are read from that one."""
    offered = _router_methods() | {"known"}
    wrong = []
    for name in PATHS:
        if name.startswith(("proxy.core.routing", "replayer.simulator")):
            continue
        for node in ast.walk(tree(name)):
            if not isinstance(node, ast.Attribute):
                continue
            of = ast.unparse(node.value).split(".")
            is_part = of[-1].endswith("router") and node.attr not in offered
            if is_part or (len(of) > 1 and of[-1] == "known" and of[-2].endswith("router")):
                wrong.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong


def test_only_what_drives_the_router_imports_it_in_the_core() -> None:
    users = {
        n for n in PATHS if n.startswith("proxy.core") and "proxy.core.routing.router" in ours(n)
    }
    assert users == {"proxy.core.routing.request_flow", "proxy.core.routing.waiting"}


def _chain(name: str, above: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The longest chain of imports that begins with a module."""
    assert name not in above, f"a circle: {' '.join((*above, name))}"
    return _longest(name, (*above, name))


_chains: dict[str, tuple[str, ...]] = {}


def _longest(name: str, above: tuple[str, ...]) -> tuple[str, ...]:
    if name not in _chains:
        behind = [_chain(module, above) for module in sorted(ours(name)) if module in PATHS]
        _chains[name] = (name, *max(behind, key=len, default=()))
    return _chains[name]


def test_no_circle_and_no_long_chain(capsys: pytest.CaptureFixture[str]) -> None:
    longest = max((_chain(name) for name in PATHS), key=len)
    with capsys.disabled():
        print(f"\nlongest chain of imports, {len(longest)} modules: {' > '.join(longest)}")
    assert len(longest) <= MOST_CHAINED


def test_no_folder_is_a_crowd(capsys: pytest.CaptureFixture[str]) -> None:
    entries: dict[Path, int] = {}
    for path in [*PATHS.values(), *(ROOT / "bench").rglob("*.py")]:
        is_package = path.name == "__init__.py"
        folder = path.parent.parent if is_package else path.parent
        if path.parent != ROOT and folder != ROOT:
            entries[folder] = entries.get(folder, 0) + 1
    with capsys.disabled():
        print("\nentries:", *(f"{f.relative_to(ROOT)} {n}" for f, n in sorted(entries.items())))
    assert max(entries.values()) <= MOST_ENTRIES


@pytest.mark.parametrize("heavy", ["pandas", "plotly", "pydantic"])
def test_the_proxy_stays_light(heavy: str) -> None:
    for name in PATHS:
        if name.startswith(("proxy.", "replayer.")):
            assert heavy not in {module.split(".")[0] for module in imported(name)}, name


@pytest.mark.long
def test_a_proxy_that_serves_has_not_loaded_what_it_never_needs() -> None:
    """Each of these is a megabyte or more for as long as it runs."""
    tops = _loaded("import proxy.cli, proxy.app")
    assert "proxy.app" in tops
    assert not tops & {"pydantic", "pandas", "importlib.metadata", "zipfile", "sysconfig"}
    assert not tops & {"proxy.core.thermal.controller", "proxy.admin.fleet_check"}


def test_a_command_that_only_prints_loads_no_server() -> None:
    """That takes three times as long as all else which `--version` does."""
    tops = _loaded("import proxy.cli\ntry: proxy.cli.main(['--version'])\nexcept SystemExit: pass")
    assert "proxy.cli" in tops
    assert not tops & {"aiohttp", "uvloop", "prometheus_client", "proxy.app", "importlib.metadata"}


def _loaded(code: str) -> set[str]:
    """The modules that a process has once it has run some code."""
    command = [sys.executable, "-P", "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@cache
def compiled() -> set[str]:
    """The modules that setup.py compiles."""
    setup = ast.parse((ROOT / "setup.py").read_text("utf-8"))
    values = {
        ast.unparse(node.targets[0]): node.value
        for node in setup.body
        if isinstance(node, ast.Assign)
    }
    places, kept = values["COMPILED"], values["INTERPRETED"]
    assert isinstance(kept, ast.Call)
    interpreted = {name_of(ROOT / name) for name in ast.literal_eval(kept.args[0])}
    assert interpreted <= PATHS.keys()
    found = set()
    for place in map(ROOT.joinpath, ast.literal_eval(places)):
        inside = {n for n, path in PATHS.items() if path.is_relative_to(place)}
        assert inside, place
        found |= {n for n in inside if PATHS[n].name != "__init__.py"}
    assert interpreted <= found
    return found - interpreted


@pytest.mark.long
def test_nothing_interpreted_inherits_from_what_is_compiled() -> None:
    for name in PATHS.keys() - compiled():
        bases = dict(_bases(tree(name)))
        assert compiled().isdisjoint(bases), f"{name}: {bases}"


@pytest.mark.long
def test_nothing_compiled_waits_while_it_handles_an_exception() -> None:
    """mypyc keeps no exception of a coroutine across a wait: it would raise another task's."""
    waits = [
        f"{PATHS[name].relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        for name in sorted(compiled())
        for node in _waits_in_handlers(tree(name), is_handling=False)
    ]
    assert not waits


def _waits_in_handlers(node: ast.AST, *, is_handling: bool) -> Iterator[ast.AST]:
    """What waits within `except`, `finally` or an `async with`, which does so when it breaks."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    waits = (ast.Await, ast.AsyncFor, ast.Yield, ast.YieldFrom)
    if isinstance(node, ast.AsyncWith) or (is_handling and isinstance(node, waits)):
        yield node
    for field, value in ast.iter_fields(node):
        is_handler = isinstance(node, ast.Try) and field in ("handlers", "finalbody")
        inside = not isinstance(node, functions) and (is_handling or is_handler)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _waits_in_handlers(child, is_handling=inside)


@pytest.mark.long
def test_no_compiled_coroutine_has_a_function_in_it() -> None:
    """mypyc keeps it where the function finds its variables: a reference cycle.

    The same holds for functions of one function that call each other.
    """
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for name in sorted(compiled()):
        for node in ast.walk(tree(name)):
            if isinstance(node, functions):
                inside = [n for n in ast.walk(node) if n is not node and isinstance(n, functions)]
                used = {n for part in inside for n in _names(part, ast.Load)}
                at = f"{PATHS[name].relative_to(ROOT)}:{node.lineno}"
                assert not (inside and isinstance(node, ast.AsyncFunctionDef)), at
                assert used.isdisjoint(n.name for n in inside), at


@pytest.mark.long
def test_what_compiled_code_cleans_up_may_not_have_become_none() -> None:
    """mypyc gives a name in `finally` the type that it has where the body ends well."""
    for name in sorted(compiled()):
        nones = set(_set_to_none(tree(name)))
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Try) and _may_fall_through(node):
                set_within = {n for part in node.body for n in _names(part, ast.Store)}
                used = {n for part in node.finalbody for n in _names(part, ast.Load)}
                at = f"{PATHS[name].relative_to(ROOT)}:{node.lineno}"
                assert not used & set_within & nones, at


def _set_to_none(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            if any(isinstance(v, ast.Constant) and v.value is None for v in values):
                yield from _names(node, ast.Store)


def _may_fall_through(node: ast.Try) -> bool:
    """Whether what comes after it may run."""
    ends = [node.orelse or node.body, *(handler.body for handler in node.handlers)]
    return not all(isinstance(end[-1], ast.Return | ast.Raise) for end in ends)


def _names(node: ast.AST, use: type[ast.expr_context]) -> set[str]:
    """The names and attributes that it uses so."""
    named = (n for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute))
    return {ast.unparse(n) for n in named if isinstance(n.ctx, use)}


PURE = frozenset({"find", "index", "len", "max", "min", "rfind", "_before_answer"})
"""What may be called twice for a slice."""


def test_nothing_compiled_calls_in_a_slice_what_must_run_once() -> None:
    """mypyc evaluates the ends of some slices twice: those of a memoryview, for one."""
    for name in sorted(compiled()):
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Slice):
                calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
                called = {f.attr if isinstance(f, ast.Attribute) else ast.unparse(f) for f in calls}
                assert called <= PURE, f"{PATHS[name].relative_to(ROOT)}:{node.lineno}"
                assert not any(isinstance(n, ast.Await | ast.NamedExpr) for n in ast.walk(node))


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        ("try:\n  await a()\nexcept E:\n  b()\nawait c()", 0),
        ("try:\n  a()\nexcept E:\n  await b()", 1),
        ("try:\n  a()\nfinally:\n  if x:\n    await b()", 1),
        ("try:\n  a()\nexcept E:\n  async def f():\n    await b()", 0),
        ("async with a() as b:\n  c()", 1),
        ("try:\n  a()\nexcept E:\n  with b:\n    yield c", 1),
    ],
)
def test_a_wait_in_a_handler_is_found(code: str, waits: int) -> None:
    assert len(list(_waits_in_handlers(ast.parse(code), is_handling=False))) == waits


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


TESTED_ELSEWHERE = {
    "proxy.core.types": "vocabulary only",
    "proxy.core.placement.candidates": "test_cost.py, routing/test_router.py: rows and columns",
    "proxy.core.thermal.policy": "test_laws.py and test_controller.py: the founding one, mistakes",
    "proxy.core.thermal.readings": "vocabulary only: readings and limits",
    "proxy.core.kvcache.links": "test_published_index.py: prompts of text, what is left of them",
    "proxy.core.known.tables": "test_fleet_state.py, thermal/test_fleet_limits.py, state/",
    "proxy.core.accounts.lease": "test_ledger.py: the conservation law",
    "proxy.core.sharing.batch": "test_journal.py and test_apply.py: vocabulary only",
    "proxy.net.bus.base": "bus/test_redis.py: the contract over every bus",
    "proxy.net.bus.memory": "bus/test_redis.py: the contract over every bus",
    "proxy.admin.replicas": "scenarios/test_replicas.py",
    "proxy.process.body_worker": "request/test_large_bodies.py: the process itself",
    "proxy.core.routing.actions": "test_request_flow.py: each path as a transcript",
    "proxy.core.routing.route": "test_router.py and test_lifecycle.py: every step of a route",
    "proxy.fleet.discovery.base": "vocabulary only",
    "proxy.fleet.probes": "scenarios/test_breaker.py, process/test_hot_restart.py",
    "proxy.fleet.sensors.base": "sensors/test_dcgm.py and test_registry.py: bounds, faults",
    "proxy.fleet.sensors.simulated": "sensors/test_registry.py: degrees by the clock",
    "proxy.net.server.handshakes": "net/test_tls.py: who does not shake hands is closed",
    "proxy.net.server.origin": "admin/test_auth.py and planner/test_control.py",
    "proxy.net.server.refusals": "net/server/test_connection.py and bad_input",
    "proxy.net.server.request_loop": "request/test_relay_edges.py: keep-alive, pipelining",
    "proxy.net.server.responses": "scenarios/test_dialects.py, test_streams.py and test_faults.py",
    "proxy.request.client_response": "request/test_relay.py",
    "proxy.request.exchange": "every file of scenarios",
    "proxy.request.moves": "scenarios/test_migration.py",
    "proxy.request.stream_accounting": "scenarios/test_streams.py",
    "proxy.state.proxy_state": "every file of scenarios",
    "proxy.telemetry.requests": "scenarios/test_faults.py, admin/test_endpoints.py",
    "replayer.demo.__main__": "tests/test_demo.py",
    "replayer.demo.fleet": "tests/test_demo.py: both kinds of run are made of it",
    "replayer.demo.one_run": "tests/test_demo.py: offloads, a killed engine",
    "replayer.demo.scene": "tests/test_demo.py: the tour's second part",
    "replayer.engine.types": "vocabulary only",
    "replayer.replay.__main__": "tests/test_extras.py: it says what is not installed",
    "replayer.simulator.driver": "simulator/test_api.py and test_host.py",
    "replayer.virtual.arrivals": "virtual/test_load.py",
    "replayer.virtual.hooks": "virtual/test_fleet.py: what observers hear",
    "replayer.virtual.legs": "virtual/test_fleet.py and analysis/check/test_fit.py",
    "replayer.virtual.recorded": "analysis/check/test_check.py and test_logs.py",
    "replayer.virtual.requests": "virtual/test_fleet.py",
    "replayer.virtual.seen": "virtual/test_scaling.py: what counters would tell, orders",
    "analysis.regret.outcomes": "test_oracle.py and test_summary.py",
    "analysis.report.cli": "tests/analysis/test_cli.py: report prints the tables",
    "analysis.league.figures": "analysis/league/test_cli.py writes them",
    "analysis.league.summary": "analysis/league/test_cli.py prints it",
    "planner.core.perf.steps": "perf/test_capacity.py: tokens of a step by hand",
    "planner.core.predict.plugin": "test_pipeline.py: what the proposals are made from",
    "planner.core.propose.throughput": "test_pipeline.py: targets, floors, reasons",
    "planner.core.rules": "vocabulary only: settings",
    "planner.core.state": "test_pipeline.py: models and floors from tick to tick",
    "planner.core.types": "vocabulary only",
    "planner.cli": "planner/test_service.py: its errors, and what it validates",
    "planner.config.options": "planner/config/test_load.py: ranges and contradictions",
    "planner.plugin_api.planner_plugin_pb2_grpc": "generated: test_planner_plugin_pb2.py",
    "planner.plugin_api.wire": "plugin_api/test_channel.py: both ways, on sockets",
    "planner.scalers.noop": "planner/test_service.py: a planner that only looks",
    "planner.scalers.registry": "planner/test_service.py: the options' scalers are made",
    "planner.sources.counted": "planner/sources/test_live.py and test_prometheus.py",
    "planner.sources.engines": "planner/sources/test_live.py",
    "planner.telemetry.recorder": "planner/telemetry/test_report.py",
    "planner.telemetry.snapshot": "planner/telemetry/test_report.py and planner/test_run.py",
}
"""Modules without a test file of their name, and where their behaviour is tested."""


def _test_files(name: str) -> list[Path]:
    """Those of a module: `test_<module>.py`, or some `test_<module>_<aspect>.py`."""
    *folders, module = name.split(".")
    folder = ROOT.joinpath("tests", *folders)
    return [*folder.glob(f"test_{module}.py"), *folder.glob(f"test_{module}_*.py")]


def test_every_module_has_its_test_file_or_a_reason() -> None:
    modules = {name for name, path in PATHS.items() if path.name != "__init__.py"}
    without = {name for name in modules if not _test_files(name)}
    assert without == TESTED_ELSEWHERE.keys()


@pytest.mark.parametrize("top", BETWEEN)
def test_every_test_file_in_a_mirrored_folder_is_a_modules(top: str) -> None:
    """What is of no single module stands in `scenarios`."""
    files = set((ROOT / "tests" / top).rglob("test_*.py"))
    assert files == {path for name in PATHS for path in _test_files(name) if path in files}
