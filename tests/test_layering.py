"""Which folder may import which, read from the source. The table is in CONTRIBUTING.md."""

import ast
import functools
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("orchestrator", "workers", "connectors")


def rooms() -> dict[str, tuple[str, ...]]:
    """Every folder (or file that stands by itself) and what it may import: the table of CONTRIBUTING.md. A room is
    imported only by rooms below it there, which `test_the_table_has_no_upward_arrow` holds."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Folders")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/.]+)` \|[^|]*\| ([^|]*) \|$", section, re.MULTILINE)
    named = {path.removesuffix(".py").replace("/", "."): may for path, may in rows}
    return {name: () if may == "-" else tuple(may.split(", ")) for name, may in named.items()}


ROOMS = rooms()
# The one place where a folder reaches up: a worker's command line makes the engine that its configuration names.
MAKERS = {
    "workers.main": ("workers.sim", "workers.vllm_engine"),
    "workers.arguments": ("workers.vllm_engine",),
}

# Heavy, and present with an engine only: what does not need an engine runs, and is tested, without them.
ENGINE_PACKAGES = {"vllm", "torch", "transformers", "nixl"}
ENGINE_ROOMS = (
    "orchestrator.frontend",
    "workers.vllm_engine",
    "connectors.agent",
    "connectors.handshake",
    "connectors.host",
    "connectors.lending",
    "connectors.push",
)
ENGINE_FILES = ("orchestrator.config.demo.convert",)  # a program of its own

MAX_FILE_LINES = 350
MAX_FOLDER_ENTRIES = 14  # `__init__.py` included
LARGE_FOLDERS = ("orchestrator/simulator",)


def module_name(file: Path, root: Path = ROOT) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def sources(root: Path = ROOT) -> dict[str, Path]:
    """Every module of ours under `root`, by its dotted name."""
    files = (file for package in PACKAGES for file in (root / package).rglob("*.py"))
    return {module_name(file, root): file for file in sorted(files)}


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def imports(file: Path, ours: set[str]) -> set[str]:
    """Modules named by import statements anywhere in the file, those for type checking included."""
    found = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            assert node.module is not None
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & ours
            found |= submodules or {node.module}
    return found


def graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Every module of ours and what it imports."""
    modules = sources(root)
    return {name: imports(file, set(modules)) for name, file in modules.items()}


def room(module: str) -> str | None:
    """The longest room whose name the module's begins with; None for what is not ours, and for bare packages."""
    fitting = [name for name in ROOMS if module == name or module.startswith(name + ".")]
    return max(fitting, key=len, default=None)


def allowed(name: str) -> set[str]:
    return {entry if entry.startswith(PACKAGES) else f"orchestrator.{entry}" for entry in ROOMS[name]}


def layering_violations(modules: dict[str, set[str]]) -> list[str]:
    """Imports that the table does not have, a line each."""
    wrong = []
    for module, imported in modules.items():
        here = room(module)
        if here is None:
            wrong += [f"{module} is in no room" for _ in [0] if module not in PACKAGES]
            continue
        for other in sorted(imported):
            there = room(other)
            if there is None and other.partition(".")[0] in PACKAGES and other not in PACKAGES:
                wrong.append(f"{module} imports {other}, which is in no room")
            elif there not in (None, here) and there not in allowed(here) | set(MAKERS.get(module, ())):
                wrong.append(f"{module} imports {other}: {here} may not import {there}")
    return wrong


@functools.cache
def our_modules() -> dict[str, set[str]]:
    """What `graph` finds here; reading it takes a second."""
    return graph()


def test_every_module_is_read():
    assert len(our_modules()) > 100
    assert "orchestrator.types" in our_modules()["orchestrator.wire.messages"]


def test_folders_import_only_what_the_table_allows():
    assert layering_violations(our_modules()) == []


def test_the_table_has_no_upward_arrow():
    order = list(ROOMS)
    upward = [
        (name, other)
        for name in ROOMS
        for other in allowed(name)
        if other not in ROOMS or order.index(other) >= order.index(name)
    ]
    assert upward == []


def test_table_allows_only_used_imports():
    taken = {(room(module), room(other)) for module, imported in our_modules().items() for other in imported}
    assert [(name, other) for name in ROOMS for other in allowed(name) if (name, other) not in taken] == []


@pytest.mark.parametrize(
    "module, text",
    [
        ("orchestrator.policy.placement", "from orchestrator.router.router import Router"),
        ("orchestrator.types", "import orchestrator.config.settings"),
        ("orchestrator.store.queue", "if TYPE_CHECKING:\n    from orchestrator.fleet import view"),
        ("workers.claims", "def late():\n    from orchestrator.launch import launcher"),
        ("connectors.push.wire", "from workers.engine import Engine"),
        ("orchestrator.new_flat_module", "import os"),
    ],
)
def test_an_upward_import_is_caught(tmp_path: Path, module: str, text: str):
    file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(text + "\n")
    (found,) = layering_violations(graph(tmp_path))
    assert found.startswith(module)


def test_engines_are_imported_only_where_they_run():
    wrong = [
        f"{module} imports {imported}"
        for module, names in our_modules().items()
        if room(module) not in ENGINE_ROOMS and module not in ENGINE_FILES
        for imported in names
        if imported.partition(".")[0] in ENGINE_PACKAGES
    ]
    assert wrong == []


# What the simulated engine shares with the real one: the transfer protocol, which needs no engine.
PURE_CONNECTOR_MODULES = ("actions", "blocks.room", "inbound", "outbound", "records", "states", "wire")


def test_the_transfer_protocol_needs_no_engine():
    for name in PURE_CONNECTOR_MODULES:
        named = our_modules()[f"connectors.push.{name}"]
        assert not {other.partition(".")[0] for other in named} & ENGINE_PACKAGES, name
        ours = {other.removeprefix("connectors.push.") for other in named if other.startswith("connectors.push.")}
        assert ours <= set(PURE_CONNECTOR_MODULES), name
    reached = {
        other.removeprefix("connectors.push.")
        for module, names in our_modules().items()
        if room(module) == "workers.sim"
        for other in names
        if other.startswith("connectors.push.")
    }
    assert reached <= set(PURE_CONNECTOR_MODULES)


def test_policies_do_no_io():
    """No I/O and no clock: `now` is an argument."""
    io = ("asyncio", "time", "socket", "os", "redis*", "zmq*", "logging", "subprocess", "datetime")
    decisions = [f"orchestrator.launch.decisions.{name}" for name in ("fleet_size", "reconcile", "replacement")]
    pure = [name for name in our_modules() if room(name) == "orchestrator.policy"] + decisions
    assert [(m, o) for m in pure for o in our_modules()[m] if any(fnmatch(o, pattern) for pattern in io)] == []


def test_there_are_no_import_circles():
    """Those under TYPE_CHECKING included: two files that know each other's types are one idea in two files."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            pytest.fail(" -> ".join([*path[path.index(module) :], module]))
        if module in done or module not in our_modules():
            return
        for imported in sorted(our_modules()[module]):
            visit(imported, (*path, module))
        done.add(module)

    for module in our_modules():
        visit(module, ())


def test_files_are_short_and_folders_small():
    long = {
        name: lines
        for name, file in sources().items()
        if (lines := len(file.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert long == {}
    folders = {file.parent for file in sources().values()}
    entries = {
        str(folder.relative_to(ROOT)): len([entry for entry in folder.iterdir() if entry.name != "__pycache__"])
        for folder in folders
    }
    assert {
        name: count for name, count in entries.items() if count > MAX_FOLDER_ENTRIES and name not in LARGE_FOLDERS
    } == {}


def test_tests_mirror_the_folders():
    """A folder of tests is named like the folder that it tests; `e2e` tests whole fleets."""
    tested = {
        file.parent.relative_to(ROOT / "tests")
        for file in (ROOT / "tests").rglob("test_*.py")
        if file.parent != ROOT / "tests"
    }
    assert [str(path) for path in tested if not (ROOT / path).is_dir() and path != Path("e2e")] == []


@pytest.mark.parametrize("file", sources().values(), ids=lambda file: str(file.relative_to(ROOT)))
def test_no_wait_may_swallow_a_cancellation(file):
    """`asyncio.wait_for` of Python 3.11 does, when what it waits for comes at the same moment: `asyncio.timeout`."""
    calls = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.Attribute)]
    assert not [node.lineno for node in calls if node.attr == "wait_for"], "use asyncio.timeout"
