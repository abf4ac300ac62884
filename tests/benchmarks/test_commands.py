"""Each benchmark that a document names can be started as it says, and what no other test runs is run."""

import re
from pathlib import Path

import pytest

from benchmarks import bench_mesh

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile", *ROOT.glob("benchmarks/**/*.py")]


def test_every_benchmark_that_is_named_is_a_module_of_the_package() -> None:
    named = {
        (path.name, name)
        for path in DOCUMENTS
        for name in re.findall(r"-m benchmarks\.([a-z_]+(?:\.[a-z_]+)*)", path.read_text())
    }
    assert len(named) > 20
    folder = ROOT / "benchmarks"
    missing = {
        (document, name)
        for document, name in named
        if not (folder / f"{name.replace('.', '/')}.py").exists() and not (folder / name / "__main__.py").exists()
    }
    assert not missing
    assert not [path.name for path in DOCUMENTS if re.search(r"python\s+benchmarks/", path.read_text())]


@pytest.mark.parametrize("encrypted", [False, True])
async def test_messages_between_a_worker_and_a_frontend_are_measured(encrypted: bool) -> None:
    cpu_us, rate = await bench_mesh.measure(encrypted, messages=40, size=300)
    assert cpu_us > 0 and rate > 0
