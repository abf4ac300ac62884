"""The command line from outside: quick, one line and exit code 2 for every mistake, and nothing left running."""

import asyncio
import importlib.metadata
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pytest
import typer
from support_cli import SIM, orchestrator, refused
from support_redis import Server
from typer.testing import CliRunner

from orchestrator.cli.main import COMMANDS, load
from orchestrator.launch.host.run_folder import RunFolder, base_folder
from orchestrator.process.parent import EXIT_AGAIN
from orchestrator.store.client import connect
from orchestrator.store.fields import Launcher
from orchestrator.store.registry import Registry

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 60


def imported(*arguments: str) -> set[str]:
    """Top-level packages, and rooms of ours, that the command has imported when it ends."""
    code = (
        "import sys\nfrom orchestrator.cli.main import COMMANDS, load, main\n"
        f"sys.argv = {['orchestrator', *arguments]}\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    modules = done.stderr.splitlines()[-1].split()
    return {name.partition(".")[0] for name in modules} | {".".join(name.split(".")[:2]) for name in modules}


ENGINES = {"vllm", "torch", "transformers", "numpy", "fastapi", "nixl"}
SLOW = {"redis", "pydantic", "opentelemetry", "textual", "matplotlib"} | {
    "orchestrator.simulator",
    "orchestrator.launch.launcher",
}

UNREAD = {"yaml"}  # no file is read


@pytest.mark.parametrize(
    ("arguments", "not_needed"),
    [
        (["--version"], ENGINES | SLOW | UNREAD | {"httpx", "orchestrator.launch"}),
        (["--help"], ENGINES | SLOW | UNREAD | {"httpx", "orchestrator.launch"}),
        (["status", "--url", "http://127.0.0.1:1"], ENGINES | SLOW | UNREAD | {"httpx"}),
        (["trace", "--last", "--url", "http://127.0.0.1:1"], ENGINES | SLOW | UNREAD | {"httpx"}),
        (["queue", "--redis", "redis://127.0.0.1:1"], ENGINES | SLOW - {"redis"} | UNREAD | {"httpx"}),
        (["events", "--redis", "redis://127.0.0.1:1"], ENGINES | SLOW - {"redis"} | UNREAD | {"httpx"}),
        (["top", "--json", "--url", "http://127.0.0.1:1"], ENGINES | SLOW | {"httpx"}),
        (["up", "no-such-file"], ENGINES | SLOW - {"redis", "orchestrator.launch.launcher"} | {"httpx"}),
        (["logs", "--lines", "5", "--namespace", "none"], ENGINES | SLOW | UNREAD | {"httpx"}),
        (["config", "show", "configs/sim-2p2d.yaml", "--set", "model=m"], ENGINES | SLOW | {"httpx"}),
        (["config", "keys"], ENGINES | SLOW | UNREAD | {"httpx"}),
        (["scale", "decode=2"], ENGINES | SLOW - {"redis"} | UNREAD | {"httpx"}),
        (["role", "w", "decode", "--redis", "redis://127.0.0.1:1"], ENGINES | SLOW - {"redis"} | UNREAD | {"httpx"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_what_it_needs(arguments: list[str], not_needed: set[str]):
    """Importing Redis's client, or pydantic, alone takes a third of the 0.3 s that a command may take."""
    assert imported(*arguments) & not_needed == set()


@pytest.mark.parametrize(
    ("at_start", "exit_code", "shown"),
    [("default_int_handler", -signal.SIGINT, ""), ("SIG_IGN", 0, "Usage")],
    ids=["in the foreground", "in the background of a shell, which ignores it"],
)
def test_interrupt_while_modules_are_imported_shows_no_traceback(at_start: str, exit_code: int, shown: str):
    code = (
        f"import os, signal, sys\nsignal.signal(signal.SIGINT, signal.{at_start})\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from orchestrator.cli import start\n"
        "start()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (exit_code, "") and shown in done.stdout


def test_a_command_collects_no_garbage_while_it_imports_or_ends():
    """Nothing of what commands import is garbage: to look for some took a quarter of their time. What a command makes
    after that is collected, since some run for days."""
    code = (
        "import gc, sys\nfrom orchestrator.cli import main\nstarts, seen = [], []\n"
        "gc.callbacks.append(lambda phase, info: phase == 'start' and starts.append(info))\n"
        "before, load = len(starts), main.load\n"
        "def watched(name):\n"
        "    command = load(name)\n"
        "    seen.append((len(starts) - before, gc.isenabled()))\n"
        "    return command\n"
        "main.load = watched\nsys.argv = ['orchestrator', 'queue', '--redis', 'redis://127.0.0.1:1']\n"
        "try: main.main()\nexcept SystemExit: print(seen, len(gc.get_objects()) < 100)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout == "[(0, True)] True\n", done


def test_an_interrupt_is_not_lost_while_a_command_is_imported(tmp_path: Path):
    """Python drops an exception that a signal raises in a callback, and imports have such callbacks."""
    code = (
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from orchestrator.cli import main\nimported = main.importlib.import_module\n"
        "class Callback:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "def interrupted(name):\n"
        "    Callback()\n"
        "    return imported(name)\n"
        "main.importlib.import_module = interrupted\nsys.argv = ['orchestrator', 'up', 'none.yaml']\nmain.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == -signal.SIGINT and done.stderr == "", done


def test_option_constraints_are_checked():
    app = typer.Typer()

    @app.command()
    def command(
        there: Annotated[Path, typer.Option(exists=True)] = Path("/"),
        file: Annotated[Path, typer.Option(dir_okay=False)] = Path("none"),
        size: Annotated[int, typer.Option(parser=lambda word: int(word) * 1024, min=0)] = 0,
        share: Annotated[float, typer.Option(min=0, max=1, clamp=True)] = 0,
    ) -> None:
        print(size, share)

    def run(*arguments: str) -> str:
        return CliRunner().invoke(app, arguments).output

    assert run("--size", "2", "--share", "7") == "2048 1.0\n"
    assert "does not exist" in run("--there", "/nowhere") and "is a directory" in run("--file", "/")


@pytest.mark.parametrize("name", COMMANDS)
def test_command_list_matches_command_help(name: str):
    command = load(name)
    assert command.name == name
    assert " ".join(command.help.split()).startswith(COMMANDS[name][1])


def test_the_version_is_the_packages():
    assert orchestrator("--version").stdout == f"orchestrator {importlib.metadata.version('pd-orchestrator')}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nonsense"], "No such command 'nonsense'. See `orchestrator --help`."),
        (["status", "--nonsense"], "No such option: --nonsense. See `orchestrator status --help`."),
        (["role"], "Missing argument 'worker'. See `orchestrator role --help`."),
        (["role", "w", "boss"], "'boss' is not one of 'prefill', 'decode'. See `orchestrator role --help`."),
        (["queue", "--limit", "0"], "Invalid value for '--limit': Input should be greater than or equal to 1"),
        (["queue", "--limit", "few"], "Invalid value for '--limit': Input should be a valid integer"),
        (["simulate", "--trace", "chat", "--rate", "nan"], "Invalid value for '--rate': expected a finite number"),
        (["simulate", "--trace", "chat", "--sweep", "rate=1,inf"], "--sweep"),
        (["bench", "http://127.0.0.1:1", "--ttft", "inf"], "Invalid value for '--ttft': expected a finite number"),
        (["bench", "http://127.0.0.1:1", "--rate", "2,nan"], "--rate: expected numbers above 0"),
        (["scale", "prefill=\N{SUPERSCRIPT TWO}"], "expected prefill=X or decode=Y with an integer >= 0"),
        (["scale", "2P"], "2P: expected prefill=X or decode=Y with an integer >= 0, or both as 2P6D"),
        (["scale", "2P6D", "--namespace", "f", "--model", "m"], "give one; a model of fleet F is --namespace F.MODEL"),
        (["status", "--model=m", "--namespace=f"], "give one; a model of fleet F is --namespace F.MODEL"),
        (["config"], "Missing command. See `orchestrator config --help`."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_line(arguments: list[str], line: str):
    assert line in refused(*arguments)


def test_shells_complete_commands_and_their_options():
    def complete(words: str) -> list[str]:
        asked = {"_ORCHESTRATOR_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in asked.items():
                patch.setenv(name, value)
            return orchestrator().stdout.split()

    assert complete("orchestrator si") == ["simulate"]
    assert complete("orchestrator status --wa") == ["--watch"]


def test_valid_file_is_confirmed():
    done = orchestrator("config", "check", SIM, "--set", "workers.prefill.replicas=5")
    assert done.returncode == 0 and "ok (5P2D, engine sim, model demo)" in done.stdout


def test_mistakes_in_the_configuration_are_refused(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: demo\nworkers: {engine_args: {tensor_paralel_size: 2}}")
    line = refused("config", "check", str(file))
    assert "workers.engine_args.tensor_paralel_size: not an argument of this vLLM; did you mean tensor_parallel" in line
    assert "decode.replicas: expected an integer >= 1" in refused("up", SIM, "--set", "workers.decode.replicas=0")
    assert "decode.replicas: expected an integer >= 1" in refused("up", "--set", "workers.decode.replicas=0"), (
        "the demo"
    )
    assert "redis.urll: unknown key" in refused("up", SIM, "--set", "redis.urll=x")
    assert "cannot be read" in refused("up", str(tmp_path / "gone.yaml"))


def left_behind(namespace: str) -> list[str]:
    folder = RunFolder(namespace)
    return [str(folder.path)] if folder.path.exists() else []


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (["model=/no/such/folder"], "model: folder '/no/such/folder' does not exist"),
        (["model=no-such-org/no-such-model"], "model: 'no-such-org/no-such-model' is neither a folder nor in the"),
    ],
)
def test_a_fleet_that_cannot_start_ends_with_one_line(sets, line, tmp_path):
    ends_with_one_line(2, line, tmp_path, sets)


@pytest.mark.parametrize("options", [[], ["--detach"]])
def test_a_fleet_whose_redis_does_not_answer_yet_is_to_be_started_again(options, tmp_path):
    """As its workers are: at a boot the host of Redis may be the last one, and a service manager is to go on trying."""
    line = "orchestrator: Redis at redis://127.0.0.1:1 cannot be used"
    ends_with_one_line(EXIT_AGAIN, line, tmp_path, ["redis.url=redis://127.0.0.1:1"], options)


def ends_with_one_line(code: int, line: str, tmp_path: Path, sets: list[str], options: Sequence[str] = ()) -> None:
    (tmp_path / "config.json").write_text("{}")
    sets = ["namespace=refused", "frontend.port=0", f"model={tmp_path}", *sets]
    done = orchestrator("up", SIM, *options, *(part for item in sets for part in ("--set", item)))
    assert done.returncode == code
    assert line in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert left_behind("refused") == []


def test_a_port_in_use_is_refused_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("up", SIM, "--set", "namespace=refused", "--set", f"frontend.port={port}")
    assert f"frontend.port: port {port} on 127.0.0.1 is in use" in line
    assert left_behind("refused") == []


def test_a_second_fleet_in_a_namespace_is_refused():
    folder = RunFolder("taken")
    folder.claim()
    try:
        assert "namespace 'taken' is already served" in refused("up", SIM, "--set", "namespace=taken")
        assert "namespace 'taken' is already served" in refused("up", SIM, "--set", "namespace=taken", "--detach")
    finally:
        folder.remove()


def test_commands_without_a_fleet_say_so():
    for command in (["status"], ["scale", "decode=2"], ["role", "w", "decode"], ["drain", "w"], ["queue"]):
        assert "no fleet runs in namespace 'nobody'" in refused(*command, "--namespace", "nobody")
    assert "no fleet runs in namespace 'nobody'" in refused("down", "--namespace", "nobody")
    assert "cannot be used" in refused("status", "--redis", "redis://127.0.0.1:1")
    assert "several: expected prefill=X or decode=Y" in refused("scale", "several", "--namespace", "nobody")


def join_as_launcher(redis_url: str) -> None:
    async def launcher() -> None:
        redis = await connect(redis_url, 5)
        await Registry(redis, "default").refresh_launcher("l", Launcher(room=8), 60)
        await redis.aclose()

    asyncio.run(launcher())


@pytest.mark.parametrize("command", [["scale", "2P6D"], ["log-level", "DEBUG"], ["log-level", "DEBUG", "launcher"]])
def test_an_order_that_nobody_is_there_for_is_refused_and_left_nowhere(command: list[str], redis_url: str):
    join_as_launcher(redis_url)
    assert "has no process in this Redis" in refused(*command, "--namespace", "typo", "--redis", redis_url)
    orchestrator(*command, "--redis", redis_url)

    async def keys() -> list[bytes]:
        redis = await connect(redis_url, 5)
        found: list[bytes] = await redis.execute_command("KEYS", "*{typo}*")
        await redis.aclose()
        return found

    assert all(key.endswith(b":noted") for key in asyncio.run(keys())), "since when Redis knows the namespace"


def test_scale_reads_both_counts_in_one_word(redis_url):
    join_as_launcher(redis_url)
    said = orchestrator("scale", "2P6D", "--json", "--redis", redis_url).stdout
    assert json.loads(said) == {"prefill": 2, "decode": 6}


def test_scale_beyond_the_room_of_the_launchers_machine_needs_force(redis_url):
    join_as_launcher(redis_url)
    orchestrator("scale", "2P6D", "--redis", redis_url)
    assert "500P6D: there is room for 8 workers" in refused("scale", "prefill=500", "--redis", redis_url)
    assert "decode is asked for twice" in refused("scale", "decode=1", "2P6D", "--redis", redis_url)
    orchestrator("scale", "500P500D", "--force", "--redis", redis_url)
    fewer = orchestrator("scale", "decode=499", "--redis", redis_url)
    assert fewer.stdout == "desired: 500 prefill, 499 decode\n", fewer


def test_an_empty_fleet_is_shown_from_its_redis(redis_url):
    seen = json.loads(orchestrator("status", "--json", "--redis", redis_url).stdout)
    assert seen["workers"] == [] and seen["queue"] == {"requests": 0, "tokens": 0, "claimed": 0}
    shown = orchestrator("status", "--redis", redis_url).stdout
    assert "no worker is registered" in shown and "no frontend answers: loads are not known" in shown
    assert "not in the queue" in refused("queue", "show", "x", "--redis", redis_url)
    assert json.loads(orchestrator("queue", "--json", "--redis", redis_url).stdout)["waiting"] == []


@pytest.fixture
def redis_url(mortal: Server) -> str:
    """Of a Redis that has no other fleet."""
    return mortal.url


def test_down_cleans_up_after_killed_launcher():
    code = (
        "import os; from orchestrator.launch.host.run_folder import RunFolder\n"
        "RunFolder('dead').claim(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=TIMEOUT_S)
    assert (base_folder() / "dead").exists()
    done = orchestrator("down")
    assert done.returncode == 0 and "cleaned up after the launcher of 'dead'" in done.stdout
    assert left_behind("dead") == []
