"""A real run, watched by a real Prometheus and a real browser: every expression is answered with data."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from engine import wait
from harness import Run, write_data, write_model

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "unit" / "deploy"))
from browser import BROWSER, shown, visit  # noqa: E402

from services.coordinator.evaluation import HISTORY  # noqa: E402

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "draftmill.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
RECORDED = [rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule]
QUIET = {"NoCommit", "NotRunning", "RunFailed", "NonFinite", "SamplesFailing", "CoordinatorDown", "RoleDown",
         "RoleRestarts", "RolledBack", "ArenaNearlyFull", "AccountingMismatch", "ThroughputFell"}  # fmt: skip
JUSTLY_EMPTY = ("draftmill_gpu_", "draftmill_role_recovery_seconds", "draftmill_role_deaths_total",
                "draftmill_upload_")  # fmt: skip
"""No GPU here, nobody died, and nothing is uploaded."""

EVALUATED = {"timeline": 0, "step": 1, "acceptance_length": 1.5, "best_acceptance_length": 1.5,
             "best_step": 1, "held_out_loss": 4.0, "held_out_accuracy": 0.25, "seconds": 2.0}  # fmt: skip
"""As an evaluator beside the run would have written it."""


class Prometheus:
    """A server of its own, with the shipped rules, asking once a second."""

    def __init__(self, folder: Path, scraped: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
        config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [scraped]}]
        rules = RULES | {"groups": [group | {"interval": "1s"} for group in RULES["groups"]]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "rules.yml").write_text(yaml.safe_dump(rules))
        words = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        words += [f"--web.listen-address={self.url.removeprefix('http://')}"]
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def ask(self, path: str, **query: str):
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10
        ) as a:
            return json.load(a)["data"]

    def value(self, expression: str) -> list:
        return self.ask("query", query=expression)["result"]

    def knows(self, expression: str) -> bool:
        try:
            return bool(self.value(expression))
        except OSError:
            return False

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("live")
    run = Run(tmp_path, "run", write_model(tmp_path / "model"), write_data(tmp_path / "data", rows=4000))
    run.start()
    try:
        run.wait_step(1)
        (run.dir / HISTORY).write_text(json.dumps(EVALUATED) + "\n")
        where = json.loads((run.dir / "coordinator.json").read_text())["http"]
        with tempfile.TemporaryDirectory() as folder:
            server = Prometheus(Path(folder), where.removeprefix("http://"))
            try:
                yield run, server
            finally:
                server.close()
    finally:
        run.close()


def concrete(expression: str) -> str:
    """With values in place of Grafana's variables."""
    pairs = {
        "$job": "draftmill",
        "$instance": ".*",
        "$role": ".*",
        "$__rate_interval": "10s",
        "$__range": "1m",
    }
    for name, value in sorted(pairs.items(), key=lambda pair: -len(pair[0])):
        expression = expression.replace(name, value)
    return expression


@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus (Debian: prometheus)")
def test_every_expression_is_answered(live):
    run, server = live
    wait(lambda: server.knows("draftmill:role_waiting:ratio1m"), "recorded rules", limit_s=60, tell=run.tails)
    goal = run.committed_steps() + 10
    run.wait_step(goal)
    began_s = time.monotonic()
    queries = [target["expr"] for p in DASHBOARD["panels"] for target in p.get("targets", [])] + RECORDED
    empty = [q for q in queries if not server.value(concrete(q)) and not any(n in q for n in JUSTLY_EMPTY)]
    assert empty == []
    assert time.monotonic() - began_s < 20

    rules = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    firing = {rule["name"] for rule in rules if rule.get("state") == "firing"}
    assert not firing & QUIET
    committed = float(server.value("draftmill_samples_committed")[0]["value"][1])
    assert 0 < committed <= run.status()["samples_committed"]


@pytest.mark.skipif(BROWSER is None, reason="needs a browser (Debian: chromium)")
@pytest.mark.skipif(not shutil.which("prometheus"), reason="shares a run with the test that needs prometheus")
def test_the_page_shows_the_run_while_it_goes_on(live, tmp_path):
    run, _ = live
    url = json.loads((run.dir / "coordinator.json").read_text())["http"]
    before = run.status()
    visited = visit(url + "/", tmp_path / "profile")
    after = run.status()
    assert visited.console == []
    values = shown(visited.dom)
    assert before["step"] <= values["draftmill_step"] <= after["step"]
    committed = values["draftmill_samples_committed"]
    assert before["samples_committed"] <= committed <= after["samples_committed"]
    assert {"draftmill_loss", "draftmill_accepted_tokens", "draftmill_arena_bytes"} <= values.keys()
