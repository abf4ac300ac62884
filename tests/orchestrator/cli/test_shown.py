"""What commands print is shown as it is: a client names its request, and what it says is no markup of ours."""

import asyncio
import io
import os
import pty
import select
from typing import Any

import pytest
from rich.console import Console as RichConsole
from support_cli import orchestrator
from support_redis import Server, fresh_namespace, job

from orchestrator.cli.config import show
from orchestrator.cli.doctor.command import show_check
from orchestrator.cli.doctor.host import Check
from orchestrator.cli.handle import Named
from orchestrator.cli.look import status as status_module
from orchestrator.cli.look.logs import _print_event
from orchestrator.cli.look.views import balance_lines, fleet_view
from orchestrator.cli.rollout import Event as Step
from orchestrator.cli.rollout import show_event
from orchestrator.cli.steer import log_level
from orchestrator.config.settings import Refused
from orchestrator.launch.console import Console
from orchestrator.store.client import connect
from orchestrator.store.fields import Launcher
from orchestrator.store.operator.events import Event
from orchestrator.store.queue import PrefillQueue
from orchestrator.store.registry import Registry

ODD = "cmpl-[/x][red]:100:[link=a]"  # a client's x-request-id becomes a part of such a name


def test_the_queue_names_a_request_as_its_client_did(server: Server) -> None:
    namespace = fresh_namespace()

    async def wait_for_prefill(url: str) -> None:
        redis = await connect(url, 5.0)
        await PrefillQueue(redis, namespace).enqueue(job(ODD, reply_to=ODD))
        await redis.aclose()

    asyncio.run(wait_for_prefill(server.url))
    for command in (["queue"], ["queue", "show", ODD]):
        shown = orchestrator(*command, "--namespace", namespace, "--redis", server.url).stdout
        assert shown.count(ODD) == 2


def test_the_doctor_shows_addresses_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    said = "prefill-0: [fd00::5]:20000: Connect call failed"
    show_check(Check("KV port", "fail", said, "[a/b] in the firewall"))
    assert capsys.readouterr().out == f"fail  KV port        {said}  → [a/b] in the firewall\n"


def test_last_output_of_engine_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    why = "it ended with exit code 1 (ValueError: no room in [/dev/shm] for [a])"
    _print_event(Event("1-0", 0.0, "lost", {"id": "w", "why": why}))
    show_event(Step("going_back", generation=1, why=why))
    assert capsys.readouterr().out.count(why) == 2


def test_a_start_shows_a_folder_with_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        console = Console(terminal)
        console.start_progress()
        console.stage("model", "/models/[/old][b]", done=True)
        console.close()
        shown = b""
        while b"/models/[/old][b]" not in shown and select.select([ours], [], [], 10.0)[0]:
            shown += os.read(ours, 1 << 16)  # a terminal passes on what was written in pieces
    os.close(ours)
    assert b"/models/[/old][b]" in shown


def test_a_narrow_terminal_shows_whole_names_of_workers() -> None:
    names = ["prefill-host-17-aaaa", "prefill-host-17-bbbb"]
    workers = [
        {"id": name, "role": "prefill", "state": "ready", "engine": "vllm", "host": "10.0.0.1", "pid": 123456}
        | {"step_ms": 1.5, "blocks_total": 4096, "blocks_free": 96, "running": 12, "waiting": 3, "generation": 0}
        for name in names
    ]
    narrow = RichConsole(width=50, file=io.StringIO())
    narrow.print(fleet_view({"workers": workers, "queue": None, "desired": None, "model": "m"}))
    assert all(name in narrow.file.getvalue() for name in names)  # type: ignore[attr-defined]


def test_the_balance_of_groups_is_shown() -> None:
    steps = {
        "steps": 900,
        "mean_tokens": 700.0,
        "most_tokens": 800,
        "recent": 0.912,
        "lost_s": 3.21,
        "dummies": 40,
        "waves": 5,
    }
    workers = [{"unit": "w", "group": steps}, {"unit": "w", "group": None}, {"unit": "alone"}]
    assert balance_lines(workers) == [
        "w: balance 91% lately, 3.2 s lost to imbalance in 900 steps; 40 dummy batches, 5 waves"
    ]


async def test_status_is_shown_again_and_again_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    seen: dict[str, Any] = {"workers": [], "queue": None, "desired": None, "model": "m"}
    asked = 0

    async def fleet_status(handle: Any) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked == 3:
            assert capsys.readouterr().out.count("model m") == 2
            raise KeyboardInterrupt
        return seen

    monkeypatch.setattr(status_module, "fleet_status", fleet_status)
    monkeypatch.setattr(status_module, "_WATCH_EVERY_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        await asyncio.to_thread(status_module.status, Named(url="http://127.0.0.1:1"), watch=True)
    assert asked == 3


def test_level_without_process_and_missing_file_are_refused(server: Server) -> None:
    async def launcher(url: str, namespace: str) -> None:
        redis = await connect(url, 5)
        await Registry(redis, namespace).refresh_launcher("l", Launcher(), 60)
        await redis.aclose()

    asyncio.run(launcher(server.url, namespace := fresh_namespace()))
    with pytest.raises(Refused, match="'nobody' is no process of the fleet; it has launcher"):
        log_level(Named(namespace, server.url), "INFO", "nobody")
    with pytest.raises(Refused, match="--set a=b: changes what a file says"):
        show(None, ["a=b"])
