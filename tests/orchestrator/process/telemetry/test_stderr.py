"""The log of a process whose reader is slow, stopped or gone."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from orchestrator.process.telemetry.logs import LossyStderr

ROOT = Path(__file__).parents[4]
LOGS = (
    "import logging, sys\n"
    "from orchestrator.process.telemetry.logs import set_up\n"
    "set_up('w', 'text', 'INFO')\n"
    "for number in range(int(sys.argv[1])): logging.getLogger('pd.x').info('%d %s', number, 'x' * 400)\n"
    "print('served', flush=True)\n"
)


def test_process_with_unread_log_continues():
    """4 MB, many times as much as a pipe holds."""
    command = [sys.executable, "-c", LOGS, "10000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        said = threading.Event()
        threading.Thread(target=lambda: process.stdout.readline() == "served\n" and said.set(), daemon=True).start()
        try:
            assert said.wait(30)
        finally:
            process.kill()
        lines = process.stderr.read().splitlines()
    assert [line.split()[5] for line in lines[:100]] == [str(number) for number in range(100)]


def test_a_slow_reader_misses_nothing():
    command = [sys.executable, "-c", LOGS, "10000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        read = b""
        while data := os.read(process.stderr.fileno(), 1 << 16):
            read += data
            time.sleep(0.005)
    assert [int(line.split()[5]) for line in read.splitlines()] == list(range(10_000))


def test_lines_that_were_dropped_are_counted():
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    log = LossyStderr(writes)
    line = "x" * 999 + "\n"
    for _ in range(100):
        log.write(line)
    first = os.read(reads, 1 << 20)
    log.write("after\n")
    log.write("and again\n")
    lines = (first + os.read(reads, 1 << 20)).decode().splitlines()
    dropped = 100 - lines.count(line[:-1])
    assert 0 < dropped < 100
    assert lines[-3:] == [f"({dropped} lines were not logged, since nobody took them)", "after", "and again"]
    os.close(reads)
    log.write("to nobody\n")
    os.close(writes)


@pytest.mark.parametrize("where", ["file", "closed"])
def test_regular_file_is_written_normally(where, tmp_path):
    file = tmp_path / "log"
    file.write_text("before\n")
    redirect = f"2>>{file}" if where == "file" else "2>&-"
    done = subprocess.run(["sh", "-c", f'"$0" -c "$1" 3 {redirect}', sys.executable, LOGS], cwd=ROOT, timeout=60)
    assert done.returncode == 0
    assert len(file.read_text().splitlines()) == (4 if where == "file" else 1)
