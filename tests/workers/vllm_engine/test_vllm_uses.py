"""What we use of vLLM is there, in the installed version and in the next one, and what differs there is known."""

import ast
import sysconfig
import textwrap
import tomllib
from pathlib import Path

import pytest
from vllm_contract.source import Source
from vllm_contract.uses import Shape, Use, differences, shapes, uses

PROJECT = Path(__file__).parents[3]
KNOWN = PROJECT / "tests" / "vllm_contract" / "vllm_0_33_0.toml"


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return write(
        tmp_path / "old",
        {
            "vllm/__init__.py": "from vllm.engine import Engine as Engine",
            "vllm/base.py": """
                class Base:
                    def __init__(self, size: int):
                        self.size = size
                    def stop(self):
                        "Documentation counts for nothing."
                        return self.size  # nor do comments
                """,
            "vllm/engine.py": """
                from .base import Base
                LIMIT = 3
                class Engine(Base):
                    def step(self, *, fast: bool = True) -> int:
                        return 1
                """,
        },
    )


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return write(
        tmp_path / "ours",
        {
            "workers/mine.py": """
                from vllm import Engine
                class Mine(Engine):
                    def step(self, *, fast=True):
                        return super().step() + self.size
                """,
            "workers/more.py": """
                from vllm.engine import LIMIT, Engine
                from workers.mine import Mine
                class More(Mine):
                    def stop(self):
                        return LIMIT
                def run(engine: Engine, other):
                    Engine.step = None
                    return engine.stop() + other.size + other.ours
                """,
        },
    )


def found_by(ours: Path, theirs: Path) -> dict[str, list[str]]:
    found = uses(ours, Source(ours, theirs))
    return {f"{use.how} {use.symbol}": places for use, places in found.items()}


def test_every_kind_of_use_is_found_with_its_places(ours: Path, theirs: Path) -> None:
    assert found_by(ours, theirs) == {
        "imported vllm:Engine": ["workers/mine.py:2"],
        "imported vllm.engine:Engine": ["workers/more.py:2"],
        "imported vllm.engine:LIMIT": ["workers/more.py:2"],
        "overridden vllm:Engine.step": ["workers/mine.py:4"],
        "inherited vllm:Engine.__init__": ["workers/mine.py:3", "workers/more.py:4"],
        "inherited vllm:Engine.size": ["workers/mine.py:3", "workers/more.py:4"],
        "inherited vllm:Engine.stop": ["workers/mine.py:3"],
        "overridden vllm:Engine.stop": ["workers/more.py:5"],
        "replaced vllm.engine:Engine.step": ["workers/more.py:8"],
        "read vllm.engine:Engine.stop": ["workers/more.py:9"],
        "named vllm:*.size": ["workers/more.py:9"],
    }


@pytest.mark.parametrize(
    ("file", "before", "after", "changes"),
    [
        ("base", "return self.size", "return 2 * self.size", {"inherited stop", "overridden stop"}),
        ("base", "def stop(self)", "def stop(self, now)", {"inherited stop", "overridden stop", "read stop"}),
        ("base", "self.size = size", "self.bytes = size", {"inherited size", "inherited __init__", "named size"}),
        ("engine", "return 1", "return 2", {"overridden step", "replaced step"}),
        ("engine", "LIMIT = 3", "MOST = 3", {"imported LIMIT"}),
        ("base", "Documentation counts", "A text counts", set()),
        ("base", "size: int", "size: float", set()),
    ],
)
def test_what_changed_is_named_and_nothing_else(
    ours: Path, theirs: Path, tmp_path: Path, file: str, before: str, after: str, changes: set[str]
) -> None:
    newer = tmp_path / "new"
    for path in theirs.rglob("*.py"):
        text = path.read_text()
        write(newer, {str(path.relative_to(theirs)): text.replace(before, after) if path.stem == file else text})
    used = uses(ours, Source(ours, theirs))
    changed = differences(shapes(Source(theirs), used), shapes(Source(newer), used))
    assert {f"{use.how} {use.symbol.rpartition('.')[2].rpartition(':')[2]}" for use in changed} == changes


def test_a_name_imported_from_one_of_two_places_is_there_in_either(tmp_path: Path, theirs: Path) -> None:
    text = "try:\n    from vllm.new import Engine\nexcept ImportError:\n    from vllm.engine import Engine\n"
    ours = write(tmp_path / "ours", {"workers/a.py": text})
    used = uses(ours, Source(ours, theirs))
    assert [use.symbol for use in used] == ["vllm.new:Engine|vllm.engine:Engine"]
    assert not any(shape.missing for shape in shapes(Source(theirs), used).values())


# ---- vLLM itself ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed() -> Source:
    return Source(PROJECT, Path(sysconfig.get_paths()["purelib"]))


@pytest.fixture(scope="module")
def used(installed: Source) -> dict[Use, list[str]]:
    return uses(PROJECT, installed)


@pytest.mark.slow
def test_everything_that_we_use_is_installed(installed: Source, used: dict[Use, list[str]]) -> None:
    found = shapes(installed, used)
    assert len(found) > 900
    kinds = {"imported", "optional", "read", "replaced", "overridden", "inherited", "named"}
    assert {use.how for use in found} == kinds
    assert {use: used[use] for use, shape in found.items() if shape.missing and use.how != "optional"} == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_difference_of_the_next_version_is_known(
    installed: Source, used: dict[Use, list[str]], unpacked: Path
) -> None:
    before, after = shapes(installed, used), shapes(Source(unpacked), used)
    changed = {use.symbol: why for use, why in differences(before, after).items()}
    known = {symbol for section in tomllib.loads(KNOWN.read_text()).values() for symbol in section}
    assert {symbol: why for symbol, why in changed.items() if symbol not in known} == {}
    assert known - changed.keys() == set()
    supported = tomllib.loads(KNOWN.read_text())["supported"]
    files = [PROJECT / line.rpartition(": ")[2] for line in supported.values()]
    assert all(ast.parse(file.read_text()) for file in files)


def test_a_name_that_need_not_be_there_is_optional(tmp_path: Path, theirs: Path) -> None:
    text = "try:\n    from vllm.new import dog\nexcept ImportError:\n    dog = None\n"
    ours = write(tmp_path / "ours", {"workers/a.py": text})
    assert [(use.how, use.symbol) for use in uses(ours, Source(ours, theirs))] == [("optional", "vllm.new:dog")]


def test_a_name_that_is_missing_on_both_sides_is_no_difference() -> None:
    use = Use("vllm.a:b", "read")
    assert differences({use: Shape(missing=True)}, {use: Shape(missing=True)}) == {}
