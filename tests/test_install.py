"""How `make venv` installs: by uv with what pip's configuration says, by pip where there is no uv or it fails."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INSTALL = ROOT / "requirements" / "install.py"
# Writes down what it was called with, and ends as `exits` of its folder says.
PROGRAM = """#!/bin/sh
[ "$2" = pip ] && name=pip || name=uv
echo "$name $* index=$UV_INDEX links=$UV_FIND_LINKS" >> "$CALLS"
case "$*" in *"$FAILS"*) echo "no such thing" >&2; exit 1;; esac
"""


def uv_environment(pip_config: str, environment: dict[str, str]) -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("install", INSTALL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.uv_environment(pip_config, environment)


@pytest.mark.parametrize(
    ("pip_config", "environment", "told"),
    [
        ("", {}, {}),
        ("global.index-url='https://mirror/simple'", {}, {"UV_DEFAULT_INDEX": "https://mirror/simple"}),
        ("global.find-links='/a /b'", {}, {"UV_FIND_LINKS": "/a,/b"}),
        ("global.extra-index-url='file:///a\\nfile:///b'", {}, {"UV_INDEX": "file:///a file:///b"}),
        (":env:.find-links='/env'\nglobal.find-links='/a'", {}, {"UV_FIND_LINKS": "/env"}),
        ("global.cert='/a'\ninstall.cert='/b'\ndownload.cert='/c'", {}, {"SSL_CERT_FILE": "/b"}),
        ("global.cert='/a'", {"SSL_CERT_FILE": "/mine"}, {"SSL_CERT_FILE": "/mine"}),
        ("global.timeout='5'\nglobal.find-links=''", {}, {}),
    ],
)
def test_uv_is_told_what_pip_is_configured_with(pip_config: str, environment: dict, told: dict):
    always = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    assert uv_environment(pip_config, environment) == {**always, **told}


def installed(
    tmp_path: Path, fails: str = "nothing", uv: str | None = "uv", lock: str = "cpu.lock"
) -> tuple[subprocess.CompletedProcess, str]:
    """Run the installer with a pip, and a uv, that only write down their calls. Its result, and the calls."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    calls.touch()
    for name in filter(None, (uv, "pip")):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    # `python -m pip` is this one.
    (tmp_path / "pip.py").write_text(
        "import os, sys\n"
        "if sys.argv[-2:] == ['config', 'list']: print(\"global.find-links='/wheels'\"); sys.exit()\n"
        f"os.execv({str(programs / 'pip')!r}, ['pip', '-m', 'pip', *sys.argv[1:]])\n"
    )
    (tmp_path / "cpu.lock").write_text("-r runtime-cpu.lock\n")
    (tmp_path / "runtime-cpu.lock").write_text("torch==1.0+cpu\nother==2\n")
    (tmp_path / "docs.lock").write_text("other==2\n")
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "CALLS": str(calls)}
    # An interpreter with no uv beside it.
    (programs / "python").symlink_to(os.path.realpath(sys.executable))
    done = subprocess.run(
        [programs / "python", INSTALL, tmp_path / lock],
        env={**environment, "FAILS": fails},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, calls.read_text()


def test_the_users_uv_installs_torch_first_then_the_lock(tmp_path: Path):
    done, calls = installed(tmp_path)
    assert done.returncode == 0, done
    torch, lock, project = calls.splitlines()
    assert "torch==1.0+cpu" in torch and "--index-url" not in torch
    assert f"-r {tmp_path}/cpu.lock" in lock and "-e ." in project
    assert all(line.startswith("uv pip install") and line.endswith("links=/wheels") for line in calls.splitlines())


def test_a_lock_beside_that_of_everything_is_installed_alone(tmp_path: Path):
    done, calls = installed(tmp_path, lock="docs.lock")
    assert done.returncode == 0 and len(calls.splitlines()) == 1 and f"-r {tmp_path}/docs.lock" in calls, done


def test_where_torch_is_in_no_configured_index_its_own_is_asked(tmp_path: Path):
    done, calls = installed(tmp_path, fails="no-deps torch")
    assert done.returncode == 0 and "no such thing" not in done.stderr, done
    assert "--index-url https://download.pytorch.org/whl/cpu torch==1.0+cpu" in calls


def test_pip_installs_where_uv_cannot_be_had_and_says_so(tmp_path: Path):
    done, calls = installed(tmp_path, fails="uv==", uv=None)
    assert done.returncode == 0 and "pip installs, which takes some minutes: uv==" in done.stdout, done
    assert [line.split()[0] for line in calls.splitlines()] == ["pip"] * 4 and "no such thing" in done.stdout


def test_pip_installs_where_uv_fails_and_says_so(tmp_path: Path):
    done, calls = installed(tmp_path, fails="pip install -q --python")
    assert done.returncode == 0 and "uv could not: pip installs" in done.stdout, done
    assert [line.split()[0] for line in calls.splitlines()][-3:] == ["pip"] * 3


def test_what_cannot_be_installed_is_an_error(tmp_path: Path):
    done, _ = installed(tmp_path, fails="install")
    assert done.returncode == 1 and "torch==1.0+cpu is in no configured index" in done.stdout, done
