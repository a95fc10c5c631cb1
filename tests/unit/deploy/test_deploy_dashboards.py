"""The committed dashboard: current, complete, and over metrics that the code serves."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
GRAFANA = ROOT / "deploy" / "grafana"
sys.path.append(str(Path(__file__).parent))
from test_deploy_rules import RECORDED, SERVED, names_in  # noqa: E402

DASHBOARD = json.loads((GRAFANA / "dashboards" / "draftmill.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_the_json_is_current():
    pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk (extra dev)")
    spec = importlib.util.spec_from_file_location("generate_dashboards", GRAFANA / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = generate
    spec.loader.exec_module(generate)
    assert (GRAFANA / "dashboards" / "draftmill.json").read_text() == generate.build(), "run `make docs`"


def test_every_expression_reads_metrics_that_exist():
    for expression in EXPRESSIONS:
        assert names_in(expression) and names_in(expression) <= SERVED | RECORDED, expression


def test_every_metric_has_a_panel():
    """But for constants, what only the end of a run knows, and `waiting`, which the page shows."""
    shown = set().union(*map(names_in, EXPRESSIONS))
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
    unseen = SERVED - shown - names_in(rules)
    assert unseen == {"draftmill_run_info", "draftmill_role_waiting"}


def test_rates_follow_the_scrape_interval():
    for expression in EXPRESSIONS:
        windows = re.findall(r"\brate\([^)]*?\[([^\]]+)\]", expression)
        assert len(windows) == len(re.findall(r"\brate\(", expression))
        assert set(windows) <= {"$__rate_interval"}, expression


def test_every_panel_says_its_unit_and_meaning_and_takes_its_source_from_the_variable():
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
    assert {panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"} >= {
        "Throughput", "Balance: who waits for whom", "Training", "Step anatomy", "Health", "GPU",
    }  # fmt: skip


def test_panels_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_provisioning_names_the_source_that_the_dashboard_wants():
    sources = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert [source["type"] for source in sources["datasources"]] == ["prometheus"]
    providers = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "draftmill.yml").read_text())
    assert providers["providers"][0]["options"]["path"] == "/var/lib/grafana/dashboards"
