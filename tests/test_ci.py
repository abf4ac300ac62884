"""`.ci/run`: a test that passes only when it is tried once more is named at the end, where nobody can miss it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# `make test` fails with what the file `fails` names; pytest tries it again and leaves what `fails_again` names.
MAKE = """#!/bin/sh
case "$*" in *test) ;; *) exit 0;; esac
[ -s fails ] || exit 0
mkdir -p .pytest_cache/v/cache; cp fails .pytest_cache/v/cache/lastfailed; exit 2
"""
PYTEST = """#!/bin/sh
cp fails_again .pytest_cache/v/cache/lastfailed
[ "$(cat fails_again)" = "{}" ]
"""


def checkout(folder: Path, fails: str, fails_again: str = "{}") -> None:
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (programs / "python").symlink_to(sys.executable)
    texts = {"make": MAKE, "pytest": PYTEST, "git": "#!/bin/sh\necho c0ffee\n"}
    texts |= dict.fromkeys(("chromium", "promtool", "tini", "redis-server"), "#!/bin/sh\n")  # it would install them
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "fails").write_text(fails)
    (folder / "fails_again").write_text(fails_again)


def run(folder: Path) -> tuple[int, list[str]]:
    """Exit code, and the lines that end the output from the summary's first on."""
    environment = {**os.environ, "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}"}
    environment.pop("GITHUB_STEP_SUMMARY", None)
    done = subprocess.run([folder / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("===")), len(lines))
    return done.returncode, lines[first:]


def test_a_run_without_failures_says_nothing(tmp_path: Path):
    checkout(tmp_path, "")
    assert run(tmp_path) == (0, [])


def test_a_test_that_passes_the_second_time_is_named_last_with_how_often(tmp_path: Path):
    checkout(tmp_path, '{"tests/a.py::one[b c]": true}')
    for runs in (1, 2):
        code, said = run(tmp_path)
        assert code == 0 and "1 TESTS FAILED" in said[0] and "a defect of the test or of the product" in said[0], said
        assert said[1:] == [
            "tests/a.py::one[b c]: passed the second time",
            f"    tried once more in {runs} runs here",
        ]


def test_a_test_that_fails_again_fails_the_run(tmp_path: Path):
    one = '{"tests/a.py::one": true}'
    checkout(tmp_path, '{"tests/a.py::one": true, "tests/a.py::two": true}', one)
    code, said = run(tmp_path)
    assert code != 0 and [line.partition(": ")[2] for line in said[1::2]] == ["failed again", "passed the second time"]


def test_many_failures_are_not_tried_again(tmp_path: Path):
    checkout(tmp_path, "{" + ", ".join(f'"t{number}": true' for number in range(11)) + "}")
    assert run(tmp_path) == (1, [])
