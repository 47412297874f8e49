"""The files in configs/ and the tables of docs/reference/options.md say what the code says."""

import re
import shutil
import subprocess
from pathlib import Path

import orjson
import pytest

from planner.config.options import PlannerOptions
from planner.core.propose.load import LoadDecision
from planner.core.propose.throughput import ThroughputDecision
from planner.telemetry.metrics import PREDICTED, SEEN
from planner.telemetry.snapshot import TickOutcome
from proxy.config.load import default_toml, load, option_tables
from proxy.config.options import Settings
from proxy.core.types import (
    Fallback,
    MoveCause,
    Outcome,
    Reason,
    RejectReason,
    RouteClass,
    Unmoved,
)
from proxy.protocol.request_framing import Refusal
from tests.support.boards import BOARDS, board_files
from tests.support.boards.drawing import EVENTS, matched
from tests.support.exported import exported, with_engines

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
NAME = r"\b(?:(?:cache_proxy|cache_planner|process)_|vllm:)\w+"
ADDED_BY_PROMETHEUS = {"job", "instance"}
"""Labels of every series."""
# A word that no series carries makes a panel or an alert silently empty.
WORDS: dict[str, set[str]] = {
    "check": set(RejectReason),
    "outcome": {*Outcome, *Unmoved, "moved", *TickOutcome},
    "reason": {*Reason, *Fallback, *RejectReason, *Refusal, *MoveCause},
    "route_class": set(RouteClass),
    "decision": {"offload", "colocate", *LoadDecision, *ThroughputDecision},
    "figure": {*SEEN, *PREDICTED},
}


def dashboards():
    return sorted((CONFIGS / "grafana").glob("*.json"))


def shown(path):
    """A board's rows and panels, those of closed rows among them, from top to bottom."""
    rows = orjson.loads(path.read_bytes())["panels"]
    return [panel for row in rows for panel in (row, *row.get("panels", ()))]


def panels():
    return [panel for path in dashboards() for panel in shown(path) if panel["type"] != "row"]


def targets():
    return [target for panel in panels() for target in panel.get("targets", [])]


def alerts():
    """Each rule's lines, by its name; text, as no YAML parser is needed for anything else."""
    text = (CONFIGS / "alerts.yml").read_text("utf-8")
    parts = re.split(r"^ +- alert: (\w+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def is_there(link):
    """Whether a page of the docs and its section exist."""
    page, _, section = link.partition("#")
    titles = re.findall(r"^#+ (.*)$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    names = {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles}
    return not section or section in names


def alert_expression(rule):
    found = re.search(r"^        expr: (?:>-\n((?: {10}.*\n)+)|(.+)\n)", rule, re.MULTILINE)
    assert found, rule
    return " ".join((found[1] or found[2]).split())


EXPRESSIONS = sorted(
    {target["expr"] for target in targets()}
    | set(map(alert_expression, alerts().values()))
    | {matched(expression, with_engines()) for _, expression in EVENTS.values()}
)


def test_proxy_toml_is_what_the_declarations_give():
    # To renew it: python -m tests.support.renew
    path = CONFIGS / "proxy.toml"
    assert path.read_text("utf-8") == default_toml()
    loaded = load(["--instances", "a:1", "--config", str(path)], {})
    given = {name for name, origin in loaded.origins.items() if origin != "default"}
    assert given == {"config", "instances"}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_name_what_is_exported(expression):
    known = with_engines()
    assert expression.count("(") == expression.count(")")
    used = re.findall(r"\b([a-z_][a-z0-9_:]*)(?:\{([^}]*)\})", expression)
    names = set(re.findall(NAME, expression))
    assert names <= set(known)
    assert names or expression.startswith("absent(up{")
    for name, matchers in used:
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
            assert label in known.get(name, set()) | ADDED_BY_PROMETHEUS
            assert set(value.split("|")) <= WORDS.get(label, {value})
    labels = ADDED_BY_PROMETHEUS.union(*(known[name] for name in names))
    for group in re.findall(r"\b(?:by|without) \(([^)]*)\)", expression):
        assert set(group.split(", ")) <= labels


def test_legends_name_labels_that_the_expression_keeps():
    known = with_engines()
    for target in targets():
        kept = re.search(r"\bby \(([^)]*)\)", target["expr"])
        names = re.findall(NAME, target["expr"])
        labels = set(kept[1].split(", ")) if kept else set().union(*(known[n] for n in names))
        labels |= set() if kept else ADDED_BY_PROMETHEUS
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target


def test_every_metric_for_an_operator_is_on_a_dashboard():
    shown = " ".join(EXPRESSIONS)
    exempt = re.compile(r"_(created|sum|count|build_info)$|_bucket$")
    missing = {name for name in exported() if not exempt.search(name) and name not in shown}
    assert not missing


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_boards_are_what_their_modules_give(board):
    # To renew them: python -m tests.support.renew
    made = board_files(with_engines())[f"{board.name}.json"]
    assert (CONFIGS / "grafana" / f"{board.name}.json").read_bytes() == made


def test_every_board_is_made_and_is_in_the_kustomization():
    names = {path.name for path in dashboards()}
    assert names == set(board_files(with_engines()))
    listed = (CONFIGS / "grafana/kustomization.yaml").read_text("utf-8")
    assert set(re.findall(r"\b\w+\.json\b", listed)) == names - {"planner.json"}


@pytest.mark.parametrize("path", dashboards(), ids=lambda path: path.name)
def test_panels_fill_their_rows_without_overlap(path):
    found = shown(path)
    ids = [panel["id"] for panel in found]
    assert len(ids) == len(set(ids))
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in found)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert all(x < 24 for x, _ in cells)
    assert len(cells) == len(set(cells)), "panels overlap"
    rows = [panel["gridPos"]["y"] for panel in found if panel["type"] == "row"]
    assert rows == sorted(rows), "rows are on the page as they are in the file"


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_says_its_unit_and_the_page_that_says_what_to_do(panel):
    assert panel["fieldConfig"]["defaults"]["unit"]
    text, link = panel["description"].split("\n\nWhat to do: ")
    assert text.endswith(".")
    assert is_there(link)


@pytest.mark.parametrize("expression", sorted({target["expr"] for target in targets()}))
def test_a_variable_picks_by_every_label_that_a_series_has(expression):
    bare = re.sub(r'(?:, )?\w+=~"\$\w+"', "", expression).replace("{}", "")
    assert matched(bare, with_engines()) == expression


def test_alerts_are_complete():
    assert alerts()
    for name, rule in alerts().items():
        assert re.search(r"^        for: \d+[sm]$", rule, re.MULTILINE), name
        assert re.search(r"^          severity: (warning|critical|page)$", rule, re.MULTILINE), name
        assert re.search(r"^          summary: \S", rule, re.MULTILINE), name
        assert re.search(r"^          action: \S", rule, re.MULTILINE), name
        link = re.search(r"^          runbook_url: (\S+)$", rule, re.MULTILINE)
        assert link, name
        assert is_there(link[1]), f"{name}: {link[1]}"


def test_prometheus_scrapes_the_default_port_and_loads_the_alerts():
    text = (CONFIGS / "prometheus.yml").read_text("utf-8")
    target = re.search(r"job_name: cache-proxy\n.*\n +- targets: (.*)\n", text)
    assert target
    assert target[1] == f'["127.0.0.1:{Settings.model_fields["port"].default}"]'
    rules = re.search(r"^rule_files:\n((?:  - .*\n)+)", text, re.MULTILINE)
    assert rules
    assert all((CONFIGS / line.split()[1]).is_file() for line in rules[1].splitlines())


@pytest.mark.parametrize(
    ("page", "model"),
    [("docs/reference/options.md", Settings), ("docs/reference/planner.md", PlannerOptions)],
)
def test_option_tables_are_what_the_declarations_give(page, model):
    # To renew them: python -m tests.support.renew
    parts = (ROOT / page).read_text("utf-8").split("<!-- options -->")
    assert len(parts) == 3, f"{page} needs the tables between two <!-- options --> lines"
    assert parts[1].strip() == option_tables(model).strip()


UNITS = sorted(CONFIGS.glob("cache-proxy*.*"))
ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not here")
def test_systemd_knows_every_line_of_the_units(tmp_path):
    for path in UNITS:
        text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", path.read_text("utf-8"))
        (tmp_path / path.name).write_text(text)
    names = [path.name.replace("@", "@1") for path in UNITS]
    assert {"cache-proxy@1.service", "cache-proxy@1.socket", "cache-proxy.target"} <= {*names}
    words = [ANALYZE, "verify", "--man=no", *(tmp_path / name for name in names)]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


@pytest.mark.parametrize("name", ["cache-proxy.service", "cache-proxy@.service"])
def test_the_options_of_the_units_are_options(name):
    found = re.search(r"(?m)^ExecStart=\S+ (.*)$", (CONFIGS / name).read_text("utf-8"))
    assert found
    words = found[1].replace("%i", "1").replace("/etc/cache-proxy.toml", f"{CONFIGS}/proxy.toml")
    settings = load([*words.split(), "--instances", "a:1"], {}).settings
    if "@" in name:
        assert settings.admin_port == 9001
        assert settings.request_log == Path("/var/log/cache-proxy/requests-1.jsonl")
        socket = (CONFIGS / "cache-proxy@.socket").read_text("utf-8")
        assert f"ListenStream={settings.port}\n" in socket
