"""What commands print is shown as it is: a client names its request, and what it says is no markup of ours."""

from __future__ import annotations

import asyncio
import os
import pty
from pathlib import Path

import pytest
from support_redis import fresh_namespace, job, queue_config, running_server

from orchestrator.cli.doctor.check import Check
from orchestrator.cli.doctor.command import _Shown
from orchestrator.cli.look.logs import _print_event
from orchestrator.cli.rollout import Event as Step
from orchestrator.cli.rollout import _print
from orchestrator.cli.steer import queue, queue_show
from orchestrator.launch.console import Console
from orchestrator.store.client import connect
from orchestrator.store.events import Event
from orchestrator.store.queue import PrefillQueue

ODD = "cmpl-[/x][red]:100:[link=a]"  # a client's x-request-id becomes a part of such a name


class _NoSubcommand:
    invoked_subcommand = None


def test_the_queue_names_a_request_as_its_client_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace = fresh_namespace()

    async def wait_for_prefill(url: str) -> None:
        redis = await connect(url, 5.0)
        await PrefillQueue(redis, namespace, queue_config()).enqueue(job(ODD, reply_to=ODD))
        await redis.aclose()

    with running_server(tmp_path) as server:
        asyncio.run(wait_for_prefill(server.url))
        queue(_NoSubcommand(), namespace, server.url, False, 20)  # type: ignore[arg-type]
        assert capsys.readouterr().out.count(ODD) == 2
        queue_show(ODD, namespace, server.url)
        assert capsys.readouterr().out.count(ODD) == 2


def test_the_doctor_shows_addresses_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    said = "prefill-0: [fd00::5]:20000: Connect call failed"
    _Shown(False).all([Check("KV port", "fail", said, "[a/b] in the firewall")])
    assert capsys.readouterr().out == f"fail  KV port        {said}  → [a/b] in the firewall\n"


def test_an_engines_last_words_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    why = "it ended with exit code 1 (ValueError: no room in [/dev/shm] for [a])"
    _print_event(Event("1-0", 0.0, "lost", {"id": "w", "why": why}))
    _print(Step("going_back", generation=1, why=why))
    assert capsys.readouterr().out.count(why) == 2


def test_a_start_shows_a_folder_with_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        console = Console(terminal)
        console.start_progress()
        console.stage("model", "/models/[/old][b]", done=True)
        console.close()
        shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"/models/[/old][b]" in shown
