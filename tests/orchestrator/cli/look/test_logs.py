"""`orchestrator logs` and `events`, as typed."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from support_redis import Server, fresh_namespace, worker
from support_steering import set_desired
from support_wait import DEADLINE_S
from typer.testing import CliRunner

from orchestrator.cli.look import logs
from orchestrator.cli.look.logs import app, describe_event
from orchestrator.config.settings import Refused
from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.store.client import RedisAway, connect
from orchestrator.store.operator.events import Event, EventLog
from orchestrator.store.registry import Registry

ROOT = Path(__file__).parents[4]
runner = CliRunner()


def run(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments))
    if isinstance(done.exception, Refused):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = RunFolder("default").log_path
    path.parent.mkdir(parents=True)
    path.write_text("[decode-0] 12:00 INFO one\n[decode-01] 12:00 INFO two\n[frontend-0] 12:00 INFO three decode-0\n")
    return path


def test_the_log_of_one_process(log: Path):
    assert len(run("logs").splitlines()) == 3
    assert run("logs", "-n", "1") == "[frontend-0] 12:00 INFO three decode-0\n"
    assert run("logs", "decode-0") == "[decode-0] 12:00 INFO one\n"
    with pytest.raises(Refused, match="decode-9: no line of this process"):
        run("logs", "decode-9")
    with pytest.raises(Refused, match="no log file"):
        run("logs", "--namespace", "nobody")


def test_a_log_is_followed_into_the_file_that_replaces_it(log: Path):
    command = [sys.executable, "-m", "orchestrator.cli.main", "logs", "decode-0", "-f", "-n", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as following:
        assert following.stdout is not None and following.stderr is not None
        try:
            assert following.stdout.readline() == "[decode-0] 12:00 INFO one\n"
            with log.open("a") as file:
                file.write("[frontend-0] not this\n[decode-0] added\n")
            assert following.stdout.readline() == "[decode-0] added\n"
            log.replace(log.with_name("default.log.1"))
            log.write_text("[decode-0] in the new file\n")
            assert following.stdout.readline() == "[decode-0] in the new file\n"
            following.send_signal(signal.SIGINT)
            assert (following.wait(DEADLINE_S), following.stderr.read()) == (128 + signal.SIGINT, "")
        finally:
            following.kill()


def test_a_line_that_comes_while_older_ones_are_read_is_followed(log: Path, monkeypatch: pytest.MonkeyPatch):
    def mine(line: str) -> bool:
        if line.endswith("three decode-0"):
            with log.open("a") as file:
                file.write("[decode-0] meanwhile\n")
        return True

    monkeypatch.setattr(logs, "_of", lambda process: mine)
    monkeypatch.setattr(logs.time, "sleep", Mock(side_effect=KeyboardInterrupt))
    assert runner.invoke(app, ["logs", "-f"]).stdout.splitlines()[2:] == [
        "[frontend-0] 12:00 INFO three decode-0",
        "[decode-0] meanwhile",
    ]


def test_every_line_of_json_is_an_object(log: Path):
    """Also where a full disk has left a piece of one, and whatever Unicode calls the end of a line."""
    said = {"time": "t", "process": "decode-0", "message": "a\u2028b\x85c"}
    log.write_text(json.dumps(said, ensure_ascii=False) + '\n{"time":"t","proc\n[decode-0] after\n')
    lines = run("logs", "--json").split("\n")[:-1]
    assert json.loads(lines[0]) == said and "proc" in json.loads(lines[1])["message"] and len(lines) == 3
    assert json.loads(lines[2]) == {"process": "decode-0", "message": "after"}


def test_following_events_shows_all_that_are_new_and_outlives_a_redis_that_is_away(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    namespace, limits = fresh_namespace(), []
    read = EventLog.read

    async def happens(self: EventLog, after: str, limit: int) -> list[Event]:
        limits.append(limit)
        if len(limits) == 2:
            raise RedisAway("it fails over")
        if len(limits) == 5:
            raise KeyboardInterrupt
        for number in range(3):
            await self.note("joined", id=f"{len(limits)}.{number}")
        return await read(self, after, limit)

    monkeypatch.setattr(EventLog, "read", happens)
    where = ["--redis", server.url, "--namespace", namespace]
    shown = runner.invoke(app, ["events", "-f", "-n", "2", "--json", *where]).stdout
    ids = [json.loads(line)["fields"]["id"] for line in shown.splitlines()]
    assert ids == ["1.1", "1.2", "3.0", "3.1", "3.2", "4.0", "4.1", "4.2"]


def test_events_are_shown(server: Server):
    namespace = fresh_namespace()

    async def happen(url: str) -> None:
        redis = await connect(url, 5.0)
        registry = Registry(redis, namespace)
        await registry.join(worker("w1"), 60.0)
        await set_desired(registry, 1, 2, "scale")
        await redis.aclose()

    asyncio.run(happen(server.url))
    where = ("--redis", server.url, "--namespace", namespace)
    lines = run("events", *where).splitlines()
    assert "worker w1 joined as a prefill worker" in lines[0]
    assert "desired: 1 prefill, 2 decode, by scale" in lines[1]
    (last,) = [json.loads(line) for line in run("events", *where, "--json", "--limit", "1").splitlines()]
    assert (last["type"], last["fields"]["decode"]) == ("scaled", "2")


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Event("1", 0.0, "lost", {"kind": "worker", "id": "w", "why": "silent"}), "worker w is lost: silent"),
        (
            Event("1", 0.0, "flipped", {"kind": "worker", "id": "w", "from": "a", "to": "b"}),
            "worker w changed from a to b",
        ),
        (Event("1", 0.0, "decided", {"decision": "3P1D -> 0P4D: x"}), "ratio.mode: auto: 3P1D -> 0P4D: x"),
        (Event("1", 0.0, "retried", {"frontend": "f", "why": "x", "count": "3"}), "3 requests retried by f: x"),
        (Event("1", 0.0, "left", {"kind": "frontend", "id": "f"}), "frontend f left"),
    ],
)
def test_each_event_type_has_its_text(event: Event, said: str):
    assert describe_event(event) == said
