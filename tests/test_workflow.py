"""GitHub runs what a change must pass, `.ci/run`, on the Python that this is for; hooks run what `make lint` does."""

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


def test_hooks_run_the_linters_of_make_lint():
    """The same programs of `.venv`, so the lock's versions; the hooks name the files that are committed."""
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local" and {hook["language"] for hook in local["hooks"]} == {"system"}
    hooks = [re.sub(r"\.venv/bin/| --force-exclude", "", hook["entry"]) for hook in local["hooks"]]
    recipe = re.search(r"^lint: venv\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    linters = [re.sub(r"\$\(BIN\)/| \.$", "", line.strip()) for line in recipe[1].splitlines()]
    assert len(linters) == 3 and hooks == linters
    locked = (ROOT / "requirements" / "cpu.lock").read_text()
    assert all(f"\n{linter.split()[0]}==" in locked for linter in linters)
