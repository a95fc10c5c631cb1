"""The compose files and the variables they speak of. tests/compose brings them up."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from services.config.load import load
from services.config.names import BY_VARIABLE, PREFIX

ROOT = Path(__file__).parents[3]
FILES = ("docker-compose.yml", "deploy/compose.demo.yml", "deploy/compose.gpu.yml")
COMPOSE = shutil.which("docker-compose")
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def variables(text: str) -> dict[str, str]:
    """Assignments of an env file, those behind `# ` too."""
    return dict(re.findall(r"^(?:# )?([A-Z_]+)=(\S*)$", text, re.MULTILINE))


def rendered(tmp_path: Path, *files: str, **changes: str) -> dict:
    """What docker-compose makes of `files` and the example's variables."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    shutil.copy(ROOT / "docker-compose.yml", folder)
    example = (ROOT / ".env.example").read_text().replace("COMPOSE_FILE=", "#")
    (folder / ".env").write_text(example + "".join(f"{name}={value}\n" for name, value in changes.items()))
    words = [word for file in files for word in ("-f", file)]
    done = subprocess.run([COMPOSE, *words, "config"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)["services"]


def test_every_dflash_variable_is_an_option():
    text = "".join((ROOT / name).read_text() for name in (*FILES, ".env.example"))
    named = set(re.findall(rf"\b{PREFIX}[A-Z_]*[A-Z]", text))
    assert named and named <= BY_VARIABLE.keys()


def test_the_example_is_a_valid_configuration():
    given = variables((ROOT / ".env.example").read_text())
    environ = {name: value for name, value in given.items() if name.startswith(PREFIX)}
    config = load(ROOT / "examples" / "demo" / "demo.toml", environ=environ).config
    assert config.target.count == 2 and config.target.gpus == ("0", "1", "2", "3")


def test_no_service_is_named_so_that_links_would_make_our_variables():
    names = [name for file in FILES for name in yaml.safe_load((ROOT / file).read_text())["services"]]
    assert not [name for name in names if name.upper().replace("-", "_").startswith(PREFIX.rstrip("_"))]


def test_nothing_has_more_rights_than_it_needs():
    text = "".join((ROOT / name).read_text() for name in FILES)
    assert "privileged: true" not in text and "pid: host" not in text and "network_mode" not in text
    for name in ("coordinator", "target", "drafter", "evaluator"):
        service = SERVICES[name]
        assert service["cap_drop"] == ["ALL"] and service["init"]
        assert service["ulimits"]["memlock"] == "${MEMLOCK:--1}"
        assert service["restart"] == "unless-stopped"
        assert "healthcheck" in service or name == "evaluator"  # no member: its watchdog judges it
    published = {name: service.get("ports", []) for name, service in SERVICES.items()}
    assert {name for name, ports in published.items() if ports} == {"coordinator", "prometheus", "grafana"}
    assert all(re.search(r":-127\.0\.0\.1:\d+\}", port) for ports in published.values() for port in ports)


def test_compiled_kernels_outlive_their_container():
    for name in ("target", "drafter"):
        service = SERVICES[name]
        folder = Path(service["environment"]["DFLASH_RUN_COMPILE_CACHE"])
        mounts = dict(mount.split(":")[:2] for mount in service["volumes"] if mount.startswith("cache:"))
        assert folder.is_relative_to(mounts["cache"])


def test_the_coordinator_is_stopped_before_its_roles():
    assert SERVICES["coordinator"]["depends_on"] == ["target", "drafter"]
    assert "depends_on" not in SERVICES["target"] and "depends_on" not in SERVICES["drafter"]


def test_an_evaluator_is_there_when_asked_for_and_nobody_waits_for_it():
    assert SERVICES["evaluator"]["profiles"] == ["evaluator"]
    assert SERVICES["evaluator"]["command"][0] == "evaluator" and "ports" not in SERVICES["evaluator"]
    for name in FILES:
        for service in yaml.safe_load((ROOT / name).read_text())["services"].values():
            assert "evaluator" not in service.get("depends_on", {})
    assert SERVICES["eval"]["entrypoint"][:2] == ["draftmill", "eval"]


@pytest.mark.skipif(COMPOSE is None, reason="needs docker-compose (Debian: docker-compose)")
def test_replicas_and_devices_follow_the_variables(tmp_path):
    services = rendered(tmp_path, FILES[0], FILES[2], DFLASH_TARGETS="5", DFLASH_DRAFTERS="3")
    assert services["target"]["deploy"]["replicas"] == 5 and services["drafter"]["deploy"]["replicas"] == 3
    for name in ("target", "drafter"):
        devices = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert devices[0]["capabilities"] == ["gpu"]
        assert services[name]["environment"]["GRAFANA_PASSWORD"] == ""
    assert services["drafter"]["environment"]["DFLASH_ARENA_DIR"] == "/arena"


@pytest.mark.skipif(COMPOSE is None, reason="needs docker-compose (Debian: docker-compose)")
def test_what_roles_do_not_need_of_the_variables_starts_none_of_them_anew(tmp_path):
    """Compose makes a container anew whose service has changed; for drafters that is a death."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    before = rendered(tmp_path / "0", FILES[0])
    changed = {"GRAFANA_PASSWORD": "x", "GRAFANA_AT": "127.0.0.1:3001", "PROMETHEUS_AT": "127.0.0.1:9091"}
    after = rendered(tmp_path / "1", FILES[0], COMPOSE_PROFILES="monitoring", **changed)
    for name in ("coordinator", "target", "drafter"):
        assert before[name]["environment"] == after[name]["environment"]
    assert after["target"]["environment"]["DFLASH_TARGETS"] == str(after["target"]["deploy"]["replicas"])


@pytest.mark.skipif(COMPOSE is None, reason="needs docker-compose (Debian: docker-compose)")
def test_the_demo_waits_for_its_model_and_data(tmp_path):
    services = rendered(tmp_path, FILES[0], FILES[1])
    for name in ("coordinator", "target", "drafter"):
        assert services[name]["depends_on"]["demo"]["condition"] == "service_completed_successfully"
