"""Imports point one way, and what needs no torch does not load it.

protocol <- services; a role's folder never imports another role's; services/dflash knows no messages.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROLES = ("coordinator", "target", "drafter", "evaluator")
TORCH_FREE = [
    "protocol",
    "services.config.load",
    "services.config.fingerprint",
    "services.cli",
    "services.lifecycle",
    "services.logging",
    "services.link",
    "services.coordinator",
    "services.data.dataset",
    "services.data.plan",
    "services.local",
]


def imports_of(file: Path) -> set[str]:
    """Modules that `file` imports anywhere, also inside functions and for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def importing(folder: str) -> list[tuple[Path, set[str]]]:
    return [(file, imports_of(file)) for file in sorted((ROOT / folder).rglob("*.py"))]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def broken(folder: str, *packages: str) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file, names in importing(folder)
        for name in sorted(names)
        if any(within(name, package) for package in packages)
    ]


def test_protocol_imports_no_services_and_no_torch():
    assert broken("protocol", "services", "torch", "transformers") == []


@pytest.mark.parametrize("role", ROLES)
def test_a_role_never_imports_another(role):
    others = [f"services.{other}" for other in ROLES if other != role]
    assert broken(f"services/{role}", *others, "services.local", "services.cli", "services.check") == []


def test_the_method_knows_neither_sockets_nor_messages():
    forbidden = [f"services.{role}" for role in ROLES]
    forbidden += ["zmq", "services.link", "services.transport", "protocol.messages", "protocol.sockets"]
    assert broken("services/dflash", *forbidden) == []


def test_configuration_and_data_import_no_role():
    roles = [f"services.{role}" for role in ROLES]
    assert broken("services/config", *roles, "torch", "zmq", "transformers") == []
    assert broken("services/data", *roles) == []
    assert broken("services/transport", *roles) == []
    assert broken("services/local", *roles, "torch") == []


def modules(name: str) -> list[str]:
    path = ROOT / name.replace(".", "/")
    if not path.is_dir():
        return [name]
    return [f"{name}.{file.stem}" for file in sorted(path.glob("*.py")) if file.stem != "__init__"]


def test_torch_stays_out_of_everything_that_needs_none():
    """In a process of its own: this one has imported torch long ago."""
    names = [module for name in TORCH_FREE for module in modules(name)]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_only_the_configuration_reads_the_environment():
    readers = [
        str(file.relative_to(ROOT))
        for folder in ("protocol", "services")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "os.environ" in file.read_text() or "os.getenv" in file.read_text()
    ]
    assert [file for file in readers if not file.startswith("services/config/")] == []


def test_nothing_is_unpickled():
    """What arrives over a socket or lies on a disk must never run: no pickle, nothing that contains one."""
    forbidden = ["pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"]
    assert broken("protocol", *forbidden) + broken("services", *forbidden) == []
    calls = ("torch.load(", "_object(", "_object_list(", "allow_pickle=True", "weights_only=False")
    readers = [
        f"{file.relative_to(ROOT)}: {call}"
        for folder in ("protocol", "services")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for call in calls
        if call in file.read_text()
    ]
    assert readers == []
