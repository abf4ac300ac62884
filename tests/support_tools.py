"""Programs that are no Python packages: skipped where one is missing, but not where `.ci/run` could install it."""

import os
import shutil

import pytest


def program(name: str, package: str) -> str:
    """Its path. Skips the test where it is not installed; in CI that is a failure, unless it cannot be installed."""
    path = shutil.which(name)
    if path is None:
        given_up = package in os.environ.get("PD_TEST_WITHOUT", "").split()
        assert given_up or not os.environ.get("CI"), f"install {package}: in CI this test must run"
        pytest.skip(f"{name} is not installed (Debian's package {package})")
    return path
