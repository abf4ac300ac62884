"""Who may import whom, read from the source: the picture in docs/architecture.md, kept true."""

from __future__ import annotations

import ast
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "workers", "connectors")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
OURS = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in FILES}

# Heavy, and present with an engine only: what does not need an engine runs, and is tested, without them.
ENGINE_FILES = ("orchestrator/frontend*.py", "workers/vllm_*.py", "connectors/*", "orchestrator/demo_convert.py")
ENGINE_PACKAGES = {"vllm", "torch", "transformers", "nixl"}


class _WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def imports(file: Path, at_run_time: bool = False) -> set[str]:
    """Modules named by import statements anywhere in the file; `at_run_time`: less those for type checking alone."""
    found = set()
    tree = ast.parse(file.read_text(), str(file))
    if at_run_time:
        tree = _WithoutTypeChecking().visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            assert node.module is not None
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & OURS
            found |= submodules or {node.module}
    return found


GRAPH = {str(file.relative_to(ROOT)): imports(file) for file in FILES}


def violations(pattern: str, forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{file} imports {module}"
        for file, named in GRAPH.items()
        if fnmatch(file, pattern)
        for module in named
        if any(fnmatch(module, f) for f in forbidden) and not any(fnmatch(module, a) for a in allowed)
    ]


def test_there_is_something_to_read():
    assert len(FILES) > 30
    assert "orchestrator.types" in GRAPH["orchestrator/messages.py"]


def test_orchestrator_never_imports_workers_or_connectors():
    assert violations("orchestrator/*", ("workers*", "connectors*")) == []


def test_connectors_import_neither():
    assert violations("connectors/*", ("orchestrator*", "workers*")) == []


def test_workers_know_no_frontend_and_no_launcher():
    # What a worker process shares with the rest: words, wire, configuration, Redis and the model's name.
    shared = "types messages config engine_wire queue registry redis_client transport demo_model".split()
    allowed = tuple(f"orchestrator.{name}" for name in [*shared, "policy*", "profile*"])
    assert violations("workers/*", ("orchestrator.*",), allowed) == []


def test_engines_are_imported_only_where_they_run():
    wrong = [
        f"{file} imports {module}"
        for file, named in GRAPH.items()
        if not any(fnmatch(file, pattern) for pattern in ENGINE_FILES)
        for module in named
        if module.partition(".")[0] in ENGINE_PACKAGES
    ]
    assert wrong == []


def test_types_stand_on_nothing_and_messages_on_types():
    assert violations("orchestrator/types.py", ("orchestrator.*",)) == []
    assert violations("orchestrator/config.py", ("orchestrator.*",)) == []
    assert violations("orchestrator/messages.py", ("orchestrator.*",), ("orchestrator.types",)) == []


def test_policies_are_pure():
    """No I/O, no clock, and nothing of ours but words and configuration."""
    io = ("asyncio", "time", "socket", "os", "redis*", "zmq*", "logging", "subprocess", "datetime")
    ours = ("orchestrator.types", "orchestrator.messages", "orchestrator.config", "orchestrator.policy*")
    assert violations("orchestrator/policy/*", io) == []
    assert violations("orchestrator/policy/*", ("orchestrator.*",), ours) == []
    assert violations("orchestrator/reconcile.py", (*io, "orchestrator.*"), ("orchestrator.types",)) == []


LAYERS: list[tuple[str, ...]] = [
    ("cli", "detach"),
    ("launcher", "frontend"),
    ("local_fleet", "operations", "http_edge"),
    ("router",),
    ("queue", "registry", "fleet", "transport", "membership"),
    ("policy",),
    ("messages", "config"),
    ("types",),
]


def test_lower_layers_never_import_higher_ones():
    rank = {f"orchestrator.{name}": at for at, names in enumerate(LAYERS) for name in names}
    wrong = []
    for file, named in GRAPH.items():
        package, _, name = file.removesuffix(".py").partition("/")
        mine = rank.get(f"{package}.{name.partition('/')[0]}")
        for module in named:
            theirs = rank.get(".".join(module.split(".")[:2]))
            if mine is not None and theirs is not None and theirs < mine:
                wrong.append(f"{file} imports {module}")
    assert wrong == []


def test_there_are_no_cycles():
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in FILES}
    modules = {name: imports(file, at_run_time=True) for file, name in names.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            pytest.fail(" -> ".join([*path[path.index(module) :], module]))
        if module in done or module not in modules:
            return
        for imported in sorted(modules[module]):
            visit(imported, (*path, module))
        done.add(module)

    for module in modules:
        visit(module, ())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_wait_may_swallow_a_cancellation(file):
    """`asyncio.wait_for` of Python 3.11 does, when what it waits for comes at the same moment: `asyncio.timeout`."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
    assert not [node.lineno for node in calls if node.attr == "wait_for"], "use asyncio.timeout"
