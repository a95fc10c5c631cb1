"""Prometheus' own tools on the shipped configuration, and that rules name only what the code serves."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from services.coordinator.metrics import FAMILIES, exposed_name

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = [
    rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = [rule["alert"] for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
SERVED = {exposed_name(family) for family in FAMILIES}

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)"
)


def names_in(expression: str) -> set[str]:
    """Metrics of ours that a PromQL expression reads."""
    return set(re.findall(r"\bdraftmill[_:][a-z0-9_:]+", expression))


@needs_promtool
@pytest.mark.parametrize(
    "words",
    ["check config prometheus.yml", "check rules rules.yml", "test rules rules_test.yml"],
)
def test_promtool(words):
    done = subprocess.run(["promtool", *words.split()], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_use_metrics_that_exist():
    used = set().union(*(names_in(rule["expr"]) for rule in RULES))
    assert used <= SERVED | RECORDED


def test_every_alert_has_a_case_that_fires():
    cases = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    fired = {c["alertname"] for test in cases for c in test["alert_rule_test"] if c["exp_alerts"]}
    assert fired == set(ALERTS)


def test_every_alert_says_what_it_is_and_how_bad():
    for rule in RULES:
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}


def test_the_manual_says_what_to_do_about_every_alert():
    manual = (ROOT / "docs" / "operations.md").read_text()
    assert [name for name in ALERTS if f"| `{name}` |" not in manual] == []


def test_the_manual_names_variables_that_exist():
    manual = (ROOT / "docs" / "operations.md").read_text()
    options = (ROOT / "docs" / "options.md").read_text()
    compose = "".join((ROOT / n).read_text() for n in ("docker-compose.yml", ".env.example"))
    capitals = set(re.findall(r"`([A-Z][A-Z_]{3,})`", manual))
    assert [name for name in capitals if name not in options and name not in compose] == []
