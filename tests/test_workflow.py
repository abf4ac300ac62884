"""GitHub runs what a change must pass: `.ci/run`, on the Python that this project is for."""

import os
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def test_github_runs_what_a_change_must_pass():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"} and os.access(ROOT / ".ci" / "run", os.X_OK)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert re.match(r"python:([\d.]+)-", job["container"]["image"])[1] == needed.removeprefix(">=")
