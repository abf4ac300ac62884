"""`make audit`: what is found fails, unless it is known; what cannot be asked is said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CLEAN = {"name": "sound", "version": "1.0", "vulns": []}
HURT = {
    "name": "hurt",
    "version": "1.0",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-2026-1"], "fix_versions": ["1.1"], "description": ""}],
}
UNKNOWN = {"name": "local", "skip_reason": "Dependency not found on PyPI"}
NO_NETWORK = "requests.exceptions.ConnectionError: Failed to resolve 'service' (Name or service not known)"
PROGRAM = """#!{python}
import json, shutil, sys
from pathlib import Path
given = sys.argv[sys.argv.index("-r") + 1]
shutil.copy(given, Path(__file__).with_name("asked"))
answer = json.loads(Path(__file__).with_name("answers").read_text())[sys.argv[sys.argv.index("-s") + 1]]
if isinstance(answer, str):
    sys.exit(answer)
print(json.dumps({{"dependencies": answer, "fixes": []}}))
""".replace('"-s"', '"--vulnerability-service"')


def audited(tmp_path: Path, answers: dict[str, object], known: str = "") -> tuple[int, str]:
    """Exit code and output, with a pip-audit that answers so: a list of packages, or the last line of an error."""
    (tmp_path / "python").symlink_to(sys.executable)  # pip-audit is looked for beside it
    program = tmp_path / "pip-audit"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "answers").write_text(json.dumps(answers))
    (tmp_path / "audit.py").write_text((ROOT / "requirements" / "audit.py").read_text())
    (tmp_path / "known-findings.txt").write_text(f"# comment\n{known}\n")
    (tmp_path / "some.lock").write_text('# comment\n-r other.lock\nhurt==1.0+cpu; python_version > "3"\nsound==1.0\n')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [tmp_path / "python", tmp_path / "audit.py", tmp_path / "some.lock"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    return done.returncode, done.stdout + done.stderr


def test_a_finding_fails_and_says_what_mends_it(tmp_path: Path):
    code, said = audited(tmp_path, {"pypi": [CLEAN, HURT]})
    assert code == 1 and "hurt 1.0: PYSEC-1 = CVE-2026-1; mended in 1.1" in said, said
    # A service knows releases, not their builds.
    assert (tmp_path / "asked").read_text() == 'hurt==1.0; python_version > "3"\nsound==1.0\n'


@pytest.mark.parametrize("name", ["PYSEC-1", "CVE-2026-1"])
def test_a_known_finding_passes_by_any_of_its_names(tmp_path: Path, name: str):
    code, said = audited(tmp_path, {"pypi": [CLEAN, HURT, UNKNOWN]}, f"{name} it is never called")
    assert code == 0 and "2 packages asked of pypi: 0 findings, 1 known ones" in said and "local" in said, said


def test_a_known_finding_needs_a_reason_and_goes_once_it_is_mended(tmp_path: Path):
    code, said = audited(tmp_path, {"pypi": [CLEAN]}, "PYSEC-1 it is never called")
    assert code == 0 and "PYSEC-1 is found no more: take it out" in said, said
    (tmp_path / "python").unlink()
    code, said = audited(tmp_path, {"pypi": [CLEAN]}, "PYSEC-1")
    assert code == 1 and "PYSEC-1: add why" in said, said


def test_another_service_is_asked_where_one_knows_nothing(tmp_path: Path):
    code, said = audited(tmp_path, {"pypi": [UNKNOWN], "osv": [HURT]})
    assert code == 1 and "pypi cannot be asked: it knows none of 1 packages" in said and "hurt 1.0" in said, said


def test_without_a_network_it_says_so_and_passes(tmp_path: Path):
    code, said = audited(tmp_path, {"pypi": NO_NETWORK, "osv": NO_NETWORK})
    assert code == 0 and "NOT AUDITED: no vulnerability service can be reached" in said, said


def test_a_failure_that_is_none_of_the_network_fails(tmp_path: Path):
    code, said = audited(tmp_path, {"pypi": "InvalidRequirementsFile: line 3"})
    assert code == 1 and "pip-audit failed: InvalidRequirementsFile: line 3" in said, said
