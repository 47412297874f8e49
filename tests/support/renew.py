"""Write every generated part of the pages and of configs/ anew: `python -m tests.support.renew`."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import indent

from docs.pages import DOCS, map_of_pages
from planner.config.options import PlannerOptions
from proxy.config.load import default_toml, option_tables
from tests.scenarios.test_mistakes import page as mistakes
from tests.support.boards import board_files
from tests.support.exported import with_engines
from tests.support.glossary import glossary, log_fields, migration_fields, shadow_fields
from tests.support.limits import fixed_limits
from tests.support.register import directions, modules
from tests.test_docs import ROOT, metric_table, path_table, planner_metric_table

BLOCKS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/contribute/register.md", "directions"): directions,
    ("docs/contribute/register.md", "modules"): modules,
    ("docs/operate/mistakes.md", "mistakes"): mistakes,
    ("docs/operate/threats.md", "fixed limits"): fixed_limits,
    ("docs/reference/glossary.md", "glossary"): glossary,
    ("docs/reference/http-api.md", "relayed paths"): path_table,
    ("docs/reference/metrics.md", "metrics"): metric_table,
    ("docs/reference/options.md", "options"): option_tables,
    ("docs/reference/planner.md", "options"): lambda: option_tables(PlannerOptions),
    ("docs/reference/planner.md", "metrics"): planner_metric_table,
    ("docs/reference/request-log.md", "request log"): log_fields,
    ("docs/reference/request-log.md", "shadow"): shadow_fields,
    ("docs/reference/request-log.md", "migrations"): migration_fields,
}
"""What makes the block between two marks of a page."""
TOML, GRAFANA = "configs/proxy.toml", "configs/grafana"
ALERTS, RULES = "configs/alerts.yml", "configs/kubernetes/overlays/monitoring/rules.yaml"


def renewed(text: str, mark: str, block: str) -> str:
    """A page with the block between two marks replaced."""
    line = f"<!-- {mark} -->"
    before, _, after = text.split(line)
    return f"{before}{line}\n{block.strip()}\n{line}{after}"


def rules() -> str:
    """The alerts as an object of the Prometheus operator."""
    alerts = (ROOT / ALERTS).read_text("utf-8")
    return f"""\
# Made of {ALERTS} by: python -m tests.support.renew
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: cache-proxy
  labels: {{app: cache-proxy}}
spec:
{indent(alerts, "  ")}"""


def main() -> None:
    """Renew all of them."""
    (ROOT / TOML).write_text(default_toml(), "utf-8")
    (ROOT / RULES).write_text(rules(), "utf-8")
    for name, board in board_files(with_engines()).items():
        (ROOT / GRAFANA / name).write_bytes(board)
    for (name, mark), made in BLOCKS.items():
        path = ROOT / name
        path.write_text(renewed(path.read_text("utf-8"), mark, made()), "utf-8")
    (DOCS / "llms.txt").write_text(map_of_pages(), "utf-8")


if __name__ == "__main__":
    main()
