"""The locked environment holds what its packages need on every supported Python, not only on this one."""

from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).parent.parent / "requirements" / "cpu.lock"


def locked_names(python: dict[str, str]) -> set[str]:
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(it.name) for it in requirements if it.marker is None or it.marker.evaluate(python)}


def needed_names(python: dict[str, str]) -> set[str]:
    needed = set()
    for distribution in distributions():
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or requirement.marker.evaluate(python):
                needed.add(canonicalize_name(requirement.name))
    return needed


# Debian 12 has 3.11.2; redis needs another package there than on 3.11.3.
@pytest.mark.parametrize("version", ["3.11.0", "3.11.2", "3.11.3"])
def test_the_lock_holds_what_another_python_needs(version):
    here = {**default_environment(), "extra": ""}
    there = {**here, "python_full_version": version, "implementation_version": version}
    left_out = needed_names(here) - locked_names(here)  # on purpose: the lock's first lines say which and why
    assert needed_names(there) - left_out <= locked_names(there)
