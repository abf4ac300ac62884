"""The end of a rank's process is noticed at once, and only while it is watched."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support_wait import until

from workers.vllm_engine.ranks import WHY, RankWatch, tell_why, told


@pytest.fixture
def ranks():
    started = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


async def test_ended_rank_is_reported_once(ranks):
    ended = []
    watch = RankWatch([rank.pid for rank in ranks], ended.append)
    await asyncio.sleep(0)
    assert ended == []
    ranks[0].kill()
    await until(lambda: ended)
    await until(lambda: ranks[1].poll() == -signal.SIGKILL)
    assert ended == [f"the process {ranks[0].pid} of one of its ranks has ended"]
    watch.close()
    watch.close()


async def test_ranks_that_end_after_watch_are_ignored(ranks):
    ended = []
    before = len(os.listdir("/proc/self/fd"))
    RankWatch([rank.pid for rank in ranks], ended.append).close()
    assert len(os.listdir("/proc/self/fd")) == before
    ranks[0].kill()
    ranks[0].wait()
    await asyncio.sleep(0.05)
    assert ended == []


async def test_rank_that_ended_earlier_is_reported(ranks):
    ended = []
    ranks[0].kill()
    ranks[0].wait()
    RankWatch([ranks[0].pid], ended.append)
    await until(lambda: ended)


async def test_missing_process_watch_is_logged(ranks, monkeypatch, caplog):
    def forbidden(pid):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    RankWatch([ranks[0].pid], lambda why: pytest.fail(why))
    assert "vLLM will say" in caplog.text


def test_what_follows_the_making_of_an_engine_is_done_with_it_and_its_failure_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Made:
        def __init__(self, has_room: bool) -> None:
            self.has_room = has_room

    class MadeAfterIt(Made):
        pass

    def then(made: Made) -> None:
        after.append(made)
        if not made.has_room:
            raise OSError("no room")

    after, why = list[Made](), str(tmp_path / "why")
    monkeypatch.setenv(WHY, why)
    tell_why(Made, then=then)
    made = MadeAfterIt(True)
    assert after == [made] and told(why) == ""
    with pytest.raises(OSError):
        Made(False)
    assert told(why) == "OSError: no room"
