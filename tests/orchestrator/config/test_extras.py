"""What only some need is imported by who needs it, and one line tells which extra a missing package comes with."""

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.engine_args import check_installed
from orchestrator.config.model import resolve_model
from orchestrator.config.settings import Config, ConfigError, FrontendConfig

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# What comes with an engine or with an extra, and who is for it alone.
OTHERS = ("accelerate", "fastapi", "gguf", "matplotlib", "nixl", "numpy", "opentelemetry", "ray", "textual", "torch")
OTHERS += ("transformers", "vllm")
THEIRS = ("cli/look/screen", "config/demo/convert", "frontend", "launch/ray")


def traces(config: Config) -> Any:
    from orchestrator.frontend.tracing import configure

    return configure(config)


@pytest.mark.parametrize(
    ("package", "does", "line"),
    [
        ("vllm", check_installed, "a fleet needs vLLM, which is not installed: .*[cpu]', or [cuda] with GPUs"),
        ("gguf", lambda config: resolve_model(config.model), "model: 'demo' needs gguf, .*[demo]'"),
        ("opentelemetry", traces, "frontend.otlp_endpoint needs OpenTelemetry, .*[otlp]'"),
    ],
)
def test_a_missing_package_is_one_line_with_its_extra(
    package: str, does: Callable[[Config], Any], line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where no demo model is kept yet
    config = Config(model="demo", frontend=FrontendConfig(otlp_endpoint="http://127.0.0.1:4317"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(ConfigError, match=line.replace("[", r"\[").replace("]", r"\]")) as refused:
        does(config)
    assert "\n" not in str(refused.value)


def test_another_interpreter_has_packages_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_installed(Config(model="demo", python="/opt/fleet/bin/python"))


def test_extras_that_a_line_names_exist():
    calls = [
        node
        for file in (ROOT / "orchestrator").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "missing"
    ]
    named = {extra.value for node in calls if isinstance(extra := node.args[2], ast.Constant)}
    assert named == {"bench", "cpu", "demo", "otlp", "ray", "top"} and named <= set(EXTRAS)


def test_everything_else_imports_without_an_extra():
    files = [file.relative_to(ROOT) for file in (ROOT / "orchestrator").rglob("*.py") if file.name != "__init__.py"]
    inside = [str(file.with_suffix("")) for file in files]
    theirs = tuple(f"orchestrator/{name}" for name in THEIRS)
    modules = sorted(name.replace("/", ".") for name in inside if not name.startswith(theirs))
    code = (
        "import importlib, sys\n"
        f"for name in {OTHERS}: sys.modules[name] = None\n"
        f"for name in {modules}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
