"""`orchestrator up` from outside: Ready and its curl, restarts, and that nothing is left however it ends."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from support_cli import orchestrator, refused
from support_fleet import RunningFleet, paste, running_fleet
from support_forked import ForkedLauncher
from support_tls import make_certificate

from orchestrator.cli import up
from orchestrator.launch.announcement import READY_FD
from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.process.parent import local_pid, started_ticks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
ONE_EACH = ("workers.prefill.replicas=1", "workers.decode.replicas=1")
DEADLINE_S = 90.0


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)


def noted(namespace: str) -> dict[str, int]:
    """The fleet's processes by name, as the launcher notes them."""
    text = (RunFolder(namespace).path / "processes.json").read_text()
    return {process["name"]: int(process["identity"].split("/")[1]) for process in json.loads(text)}


def gone(pids: list[int]) -> bool:
    return all(started_ticks(pid) is None for pid in pids)


def forsaken_memory() -> set[str]:
    """Shared memory that no living process maps: tests that run beside this one have some of their own."""
    there, mapped = {path.name for path in Path("/dev/shm").glob("psm_*")}, set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            mapped |= set(re.findall(r"/dev/shm/(psm_\w+)", maps.read_text()))
    return there - mapped


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Over HTTPS, with a certificate that clients of this process's environment trust."""
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")
    tls = f"frontend.server_args={{ssl_certfile: {certificate}, ssl_keyfile: {key}, uvicorn_log_level: error}}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(certificate))
        # An idle fleet prefills where it decodes, unless it is told otherwise.
        with running_fleet("sim-2p2d.yaml", *ONE_EACH, "routing.remote_prefill_min_tokens=256", tls) as running:
            yield running


def test_tls_url_is_served_and_shown(fleet):
    assert fleet.url.startswith("https://127.0.0.1:")
    assert all(worker["state"] == "ready" for worker in fleet.workers()), "who is told `Ready` can use all workers"
    assert fleet.http.get("/v1/models").status_code == 200
    shown = json.loads(fleet.cli("status", "--json").stdout)
    assert {worker["blocks_free"] for worker in shown["workers"]} != {None}, "a frontend answered"


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_the_curls_after_ready_work_when_pasted(fleet, shell):
    ready = next(line for line in fleet.log if line.startswith("Ready"))
    assert "model demo" in ready and "1P1D (simulated" in ready
    short, long = (paste(line, shell) for line in fleet.curls())
    for answer in (short, long):
        assert answer["choices"][0]["message"]["role"] == "assistant", answer
    assert long["usage"]["prompt_tokens"] > 256 > short["usage"]["prompt_tokens"]


def test_console_shows_requests_and_log_has_the_rest(fleet):
    line = fleet.wait_for_line(r"pd\.request .* prefilled by worker-0, decoded by worker-1", DEADLINE_S).string
    for stage in ("queued", "prefill", "exposed transfer", "decode"):
        assert re.search(rf"{stage} \d+ ms", line), line
    shown = [line for line in fleet.log if line.startswith("[")]
    assert shown and not [line for line in shown if "pd.request" not in line], "only requests"
    assert f"log: {fleet.process_log}" in fleet.log
    assert any(line.startswith("[worker-1] ") for line in fleet.process_lines())


def test_progress_is_shown(fleet):
    for name in ("worker-0", "worker-1", "frontend-0"):
        assert re.search(rf"^{name}: .*loading$", "\n".join(fleet.log), re.MULTILINE)
        assert any(re.match(rf"{name}: .*ready", line) for line in fleet.log)


@pytest.mark.parametrize("lost", ["died", "lost its socket"])
def test_embedded_redis_restart_keeps_desired_ratio(fleet, lost):
    """Also where a cleaner of temporary files has taken the whole run folder away, with the socket in it."""
    folder = RunFolder(fleet.namespace)
    assert fleet.redis_url() == f"unix://{folder.path}/redis.sock"
    if lost == "died":
        os.kill(fleet.redis_pid(), signal.SIGKILL)
    else:
        # At once: into a folder that is only being emptied the launcher puts a new socket, and rmdir fails.
        aside = folder.path.rename(folder.path.with_name(f"{folder.path.name}-aside"))
        shutil.rmtree(aside)
    fleet.wait_for_line(f"embedded server {lost}", DEADLINE_S)

    def remembers() -> bool:
        done = fleet.cli("status", "--json", check=False)
        desired = json.loads(done.stdout)["desired"] if done.returncode == 0 else None
        return desired is not None and (desired["prefill"], desired["decode"], desired["set_by"]) == (1, 1, "launcher")

    until(remembers, "desired ratio back")
    fleet.until(lambda: fleet.shape() == (1, 1), "both workers registered again")


def test_a_killed_frontend_comes_back_on_the_same_port(fleet):
    victim = noted(fleet.namespace)["frontend-0"]
    os.kill(victim, signal.SIGKILL)
    until(lambda: noted(fleet.namespace).get("frontend-0", victim) != victim, "another frontend process")
    fleet.until(lambda: fleet.http.get("/ready").status_code == 200, "the endpoint answers again")


def test_ctrl_c_ends_everything(fleet):
    """Last in this file to use the fleet: it ends it."""
    folder = RunFolder(fleet.namespace)
    pids = [*noted(fleet.namespace).values(), fleet.redis_pid()]
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.process.wait(30) == 0
    assert gone(pids) and not folder.path.exists()
    assert folder.log_path.stat().st_size > 0, "the log stays"


class Background:
    """`up --detach` and its end."""

    def __init__(self) -> None:
        self.namespace = f"detached-{uuid.uuid4().hex[:6]}"
        self.folder = RunFolder(self.namespace)

    def up(self, *sets: str) -> list[str]:
        """The command."""
        items = [f"namespace={self.namespace}", "frontend.port=0", *ONE_EACH, *sets]
        return ["up", f"{ROOT}/configs/sim-2p2d.yaml", "--detach", *(f"--set={item}" for item in items)]


@pytest.fixture
def background() -> Iterator[Background]:
    running = Background()
    yield running
    if running.folder.is_held:
        with contextlib.suppress(ProcessLookupError):
            os.kill(local_pid(running.folder.launcher() or "") or 0, signal.SIGTERM)
        running.folder.wait_until_free(30)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers of commands in this process need not import vLLM."""

    def popen(command: list[str], env: dict[str, str], **_: object) -> ForkedLauncher:
        reads, writes = os.pipe()
        launcher = ForkedLauncher(command[3:], ROOT, writes, inherits=(READY_FD, int(env[READY_FD])))
        os.close(writes)
        launcher.stdout = os.fdopen(reads, "rb")
        return launcher

    monkeypatch.setattr(up, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=0, PIPE=0, STDOUT=0))


@pytest.mark.usefixtures("forked")
def test_a_detached_fleet_runs_on_until_down_and_reports_as_json(background):
    started = orchestrator(*background.up(), "--json")
    pids = [local_pid(background.folder.launcher() or ""), *noted(background.namespace).values()]
    assert not gone(pids)
    told = json.loads(started.stdout)
    assert (told["namespace"], told["pid"]) == (background.namespace, local_pid(background.folder.launcher() or ""))
    assert httpx.get(f"{told['url']}/health").status_code == 200 and Path(told["log"]).exists()
    ended = orchestrator("down", "--namespace", background.namespace, "--json")
    assert json.loads(ended.stdout) == {"namespace": background.namespace, "ended": "in order"}
    assert gone(pids) and not background.folder.path.exists()
    assert "--detach" in refused("up", "configs/sim-2p2d.yaml", "--json")


@pytest.mark.usefixtures("forked")
def test_a_detached_fleet_that_cannot_start_says_why(background):
    line = refused(*background.up("frontend.server_args={max_logprobs: many}"))
    assert line.startswith("orchestrator: frontend-0 did not start")
    assert "many" in line and f"; log: {background.folder.log_path}" in line
    assert "many" in background.folder.log_path.read_text()
    assert not background.folder.path.exists()


def test_a_killed_launcher_takes_everything_with_it_and_the_next_one_cleans_up(background):
    before = forsaken_memory()
    command = [sys.executable, "-m", "orchestrator.cli.main", *background.up()]
    started = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert started.returncode == 0, started.stdout + started.stderr
    assert "\nReady  http://" in started.stdout and "orchestrator down" in started.stdout
    launcher = local_pid(background.folder.launcher() or "")
    pids = list(noted(background.namespace).values())
    assert launcher is not None and len(pids) == 3
    os.kill(launcher, signal.SIGKILL)
    until(lambda: gone([launcher, *pids]), "all processes gone")
    until(lambda: forsaken_memory() <= before, "nothing in shared memory is left")
    assert background.folder.path.exists() and not background.folder.is_held
    done = orchestrator("down", "--namespace", background.namespace)
    assert done.returncode == 0 and not background.folder.path.exists()


def test_a_terminal_shows_a_live_table(monkeypatch):
    """Under a pseudo-terminal: spinners while it loads, all output if it is verbose; Ctrl-C ends it."""
    monkeypatch.setenv("TERM", "xterm")
    with RunningFleet("sim-2p2d.yaml", *ONE_EACH, options=["--verbose"], terminal=True) as fleet:
        text = "\n".join(fleet.log)
        assert "✓" in text and "loading" in text and "[worker-1]" in text
    assert fleet.process.returncode == 0
