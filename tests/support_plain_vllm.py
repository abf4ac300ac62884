"""vLLM's own OpenAI server, without this project, to compare a fleet's answers with."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from support_client import FleetClient
from support_fleet import START_TIMEOUT_S
from support_servers import free_port

_STOP_TIMEOUT_S = 30


@contextlib.contextmanager
def plain_vllm(model: str, log: Path, *arguments: str, **environment: str) -> Iterator[FleetClient]:
    """`arguments`: of `vllm serve`. Its processes have ended when this returns."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *arguments]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
        while not _is_up(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        client = FleetClient(url, "")
        yield client
        client.http.close()
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engines are in its session
        process.wait()


def _is_up(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK
    return False
