"""The documents: links lead somewhere, and tables and quotes say what the code says."""

import re
from dataclasses import fields
from enum import StrEnum
from pathlib import Path

import pytest

from planner.telemetry.metrics import Metrics as PlannerMetrics
from proxy.config.options import Settings
from proxy.config.values import value_text
from proxy.core.accounts.engine_reports import EngineKv, EngineStats
from proxy.core.known.fleet_state import FleetState
from proxy.core.placement.alternatives import Alternatives, PastChecks, unpriced
from proxy.core.routing.router import Router
from proxy.core.thermal.options import RANGES, ThermalOptions
from proxy.core.types import (
    Instance,
    PastCheck,
    Reject,
    RejectReason,
    RouterConfig,
    Thresholds,
)
from proxy.fleet.discovery.discovery import DiscoveryCollector
from proxy.fleet.gauges import FleetCollector
from proxy.net.bus.form import BatchForm
from proxy.net.bus.memory import MemoryBus
from proxy.net.timeouts import Clock
from proxy.protocol.endpoints import RELAYED
from proxy.state.replicas import Replicas
from proxy.telemetry.instruments import Counts, Spreads
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.record import RequestRecord
from tests.support.glossary import described, glossary, log_fields, migration_fields, shadow_fields
from tests.support.gpus import gpu_collector
from tests.support.heat import known_heat
from tests.support.limits import fixed_limits
from tests.support.register import directions, modules
from tests.support.scenes import candidate

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^()\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def links(page):
    return LINK.findall(CODE.sub("", page.read_text("utf-8")))


def anchors(page):
    """The names that GitHub gives the headings of a page."""
    titles = HEADING.findall(FENCE.sub("", page.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page):
    for link in links(page):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def linked_pages(page):
    names = (link.partition("#")[0] for link in links(page) if "://" not in link)
    found = {(page.parent / name).resolve() for name in names if name}
    return {path for path in found if path.suffix == ".md"}


def test_every_page_is_two_clicks_from_the_readme():
    first = linked_pages(ROOT / "README.md")
    second = {page for path in first for page in linked_pages(path)}
    assert set(PAGES) <= first | second | {ROOT / "README.md"}


def test_the_pictures_have_their_ends():
    for page in PAGES:
        assert page.read_text("utf-8").count("```") % 2 == 0, page


def marked(page, mark):
    """The code block between two marks of a page."""
    parts = (ROOT / page).read_text("utf-8").split(f"<!-- {mark} -->")
    assert len(parts) == 3, f"{page} needs a block between two <!-- {mark} --> lines"
    return parts[1].strip().removeprefix("```").removesuffix("```").strip("\n")


@pytest.mark.long
def test_the_register_is_what_docstrings_and_directions_say():
    # To renew it, and every other generated table: python -m tests.support.renew
    assert marked("docs/contribute/register.md", "directions") == directions()
    assert marked("docs/contribute/register.md", "modules") == modules()


def metric_table():
    """The table of docs/reference/metrics.md: every metric with its type, labels and help text."""
    metrics = Metrics()
    for metric in vars(metrics).values():
        if isinstance(metric, Counts | Spreads) and metric.label_names:
            metric.labels(*metric.label_names)
    thresholds = Thresholds(active_prefill_tokens_threshold=1)
    router = Router(FleetState(RouterConfig(prefill_throughput=20000, thresholds=thresholds)))
    router.known.add(Instance("a", "http://a:1"))
    router.known.gate.observe_engine("a", EngineKv(1000, 0.5), 0.0)
    stats = EngineStats(
        kv_used_ratio=0.5, looked_up_tokens=4, local_hit_tokens=2, external_hit_tokens=1
    )
    router.known.published.open("a", 0)
    router.known.latency.calibration.observe("WARM", 1.0, 1.0, queued=False)
    metrics.registry.register(FleetCollector(router.known, {"a": stats}, known_heat("a")))
    metrics.registry.register(gpu_collector())
    metrics.backlog.read = lambda: {"m": 0.0}
    metrics.registry.register(DiscoveryCollector(lambda: {"dns://engines:8000": 0.0}))
    metrics.registry.register(Replicas(MemoryBus("", ""), BatchForm(), router, Clock()))
    return rows_of(metrics.registry)


def rows_of(registry):
    """A table of every metric of a registry with its type, labels and help text."""
    rows = {}
    for family in registry.collect():
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = f"{family.name}_total" if family.type == "counter" else family.name
        name = f"{name}_info" if family.type == "info" else name
        cells = (f"`{name}`", family.type, " ".join(f"`{label}`" for label in labels))
        rows[name] = f"| {' | '.join(cells)} | {family.documentation} |"
    head = "| metric | type | labels | meaning |\n|---|---|---|---|\n"
    return head + "\n".join(rows[name] for name in sorted(rows)) + "\n"


def test_the_metrics_are_those_that_are_exported():
    # To renew them: python -m tests.support.renew
    assert marked("docs/reference/metrics.md", "metrics") == metric_table().strip()
    assert marked("docs/reference/planner.md", "metrics") == planner_metric_table().strip()


def planner_metric_table():
    """The table of docs/reference/planner.md."""
    metrics = PlannerMetrics()
    for metric in vars(metrics).values():
        names = getattr(metric, "_labelnames", ())
        if names:
            metric.labels(*names)
    return rows_of(metrics.registry)


def test_the_thermal_options_have_their_defaults_and_ranges():
    text = (ROOT / "docs/concepts/thermal-options.md").read_text("utf-8")
    section = text.partition("\n## Options\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]*)\| [^|]+ \|$", section, re.MULTILINE)
    shown = {key: (default.strip(), allowed.strip()) for key, default, allowed in rows}
    assert shown == {
        field.name: (_number(field.default), " to ".join(map(_number, RANGES.get(field.name, ()))))
        for field in fields(ThermalOptions)
    }


def _number(value):
    if isinstance(value, str):
        return value
    return f"{value:g}" if value < 1e6 or value >= 1e9 else f"{value:,.0f}"


def test_the_limits_of_the_threat_model_are_the_defaults_and_their_metrics_exist():
    rows = re.findall(
        r"^\| [^|]+ \| `--([a-z-]+)` \| ([^|]+) \| ([^|]+) \|$",
        marked("docs/operate/threats.md", "limits"),
        re.MULTILINE,
    )
    assert len(rows) >= 20
    exported = metric_table()
    for option, default, seen in rows:
        field = Settings.model_fields[option.replace("-", "_")]
        assert default.partition(":")[0] == value_text(field.default), option
        metric = re.fullmatch(r"`(cache_proxy_\w+)`", seen)
        assert metric is None or f"| `{metric[1]}` |" in exported, seen


def test_the_limits_that_are_no_options_are_those_of_the_code():
    # To renew them: python -m tests.support.renew
    assert marked("docs/operate/threats.md", "fixed limits") == fixed_limits()


def test_the_request_log_has_every_field():
    # To renew it: python -m tests.support.renew
    assert marked("docs/reference/request-log.md", "request log") == log_fields()
    assert marked("docs/reference/request-log.md", "shadow") == shadow_fields()
    assert marked("docs/reference/request-log.md", "migrations") == migration_fields()


def test_the_request_log_has_every_key_of_a_candidate():
    text = (ROOT / "docs/reference/request-log.md").read_text("utf-8")
    section = text.partition("## Candidates")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    alone = unpriced(candidate("d"), 1.0)
    pair = unpriced(candidate("d"), 1.0)
    pair.prefill = alone
    rows = Alternatives([alone, pair], candidate("d").instance, None).rows()
    reason = RejectReason.DECODE_BLOCKS
    refused = PastChecks(Reject(reason, 1, past=(PastCheck("d", (reason,), 1.0),)))
    assert named == {key for row in (*rows, *refused.rows()) for key in row}


def test_the_glossary_has_every_reason_status_and_class():
    # To renew it: python -m tests.support.renew
    assert marked("docs/reference/glossary.md", "glossary") == glossary()


def test_what_has_no_description_is_found():
    class Undescribed(StrEnum):
        """Its first member has none."""

        A = "a"
        B = "b"
        """Described."""

    with pytest.raises(AssertionError, match=r"Undescribed\.A has no docstring"):
        list(described(Undescribed))


ABOUT_THE_PROXY = (
    *(f"concepts/{name}" for name in ("decisions", "admission", "failures", "offload", "sessions")),
    *("deploy/README", "deploy/container", "deploy/nginx", "operate/drain-and-upgrade"),
    *("operate/no-offload", "operate/reading-the-log", "operate/runbook", "operate/security"),
    *("operate/threats", "operate/tuning", "reference/admin-api", "reference/http-api"),
    *("reference/metrics", "reference/request-log"),
)
OTHER_FLAGS = {
    *("help", "version", "print-config", "print-file", "completion", "man"),
    *("enable-prompt-tokens-details", "kv-transfer-config"),  # of vLLM
    *("max-model-len", "max-num-seqs", "otlp-traces-endpoint"),  # of vLLM
    *("build-arg", "health-cmd", "stop-timeout"),  # of container engines
}


@pytest.mark.parametrize("name", ABOUT_THE_PROXY)
def test_flags_that_a_page_names_are_options(name):
    text = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    named = {flag.removeprefix("no-") for flag in re.findall(r"`--([a-z-]*[a-z])[ `]", text)}
    known = {field.replace("_", "-") for field in Settings.model_fields}
    assert named <= known | OTHER_FLAGS
    assert named or name == "reference/metrics"


def test_what_the_proxy_says_of_an_impossible_offload_is_in_its_source():
    text = (ROOT / "docs/operate/no-offload.md").read_text("utf-8")
    section = text.partition("\n## 2. ")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| [^|]+ \| ([^|]+) \|", section, re.MULTILINE)
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]
    source = "".join(path.read_text("utf-8") for path in sorted((ROOT / "proxy").rglob("*.py")))
    said = re.sub(r'"\s+f?"', "", source)
    parts = [part for quote in quotes for part in quote.split("...") if part.strip()]
    assert len(parts) >= 5
    assert [part for part in parts if part.strip() not in said] == []


def test_the_fields_that_answer_a_question_are_in_the_log():
    text = (ROOT / "docs/operate/reading-the-log.md").read_text("utf-8")
    section = text.partition("| question | field |")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", section))
    assert named
    assert named <= {field.name for field in fields(RequestRecord)}


def path_table():
    """The table of docs/reference/http-api.md: every path that is relayed, and what it is for."""
    names = [row.path for row in RELAYED[:-1]] + [f"{RELAYED[-1].path}..."]
    named = zip(names, RELAYED, strict=True)
    rows = [f"| `{name}` | {', '.join(row.methods)} | {row.use} |" for name, row in named]
    return (
        "\n".join(("| path | methods | what clients want of it |", "|---|---|---|", *rows)) + "\n"
    )


def test_the_relayed_paths_are_those_with_a_row():
    # To renew them: python -m tests.support.renew
    assert marked("docs/reference/http-api.md", "relayed paths") == path_table().strip()


def test_admin_and_probe_paths_are_documented():
    text = (ROOT / "docs/reference/http-api.md").read_text("utf-8")
    source = (ROOT / "proxy/app.py").read_text("utf-8")
    paths = set(re.findall(r'"(/[a-z_{}/]+)"', source))
    assert paths
    assert not {path for path in paths if path not in text}


def test_every_row_of_the_thermal_document_names_tests_that_exist():
    text = (ROOT / "docs/lab/thermal.md").read_text("utf-8")
    rows = re.findall(r"^\| T(\d+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == [*range(1, 30)]
    for _, shown in rows:
        for path, test in re.findall(r"`(tests/[^`]*)::([^`]*)`", shown):
            assert f"def {test}(" in (ROOT / path).read_text("utf-8"), test


def test_every_requirement_of_the_founding_documents_is_shown():
    """Rows are numbered; each names tests that exist, or a command of the project."""
    text = (ROOT / "docs/lab/founding.md").read_text("utf-8")
    rows = re.findall(r"^\| (T?\d+) \|.*\| ([^|]*) \|$", text, re.MULTILINE)
    plain = [int(number) for number, _ in rows if number.isdecimal()]
    assert plain == [*range(1, 31), *range(40, 65)]
    for number, shown in rows:
        names = re.findall(r"`([^`]*)`", shown)
        assert names, number
        for name in names:
            path, _, test = name.partition("::")
            found = (ROOT / path).is_file() and f"def {test}(" in (ROOT / path).read_text("utf-8")
            assert found or name.startswith("analyze elastic"), name


def test_every_row_of_the_planners_document_names_tests_that_exist():
    """A row without a test is one that is not built."""
    text = (ROOT / "docs/lab/planner.md").read_text("utf-8")
    rows = re.findall(r"^\| P(\d+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == [*range(1, 58)]
    for number, here, shown in rows:
        tests = re.findall(r"`(tests/[^`]*)::([^`]*)`", shown)
        assert tests or (shown == "not built" and "not built" in here), number
        for path, test in tests:
            assert f"def {test}(" in (ROOT / path).read_text("utf-8"), test
