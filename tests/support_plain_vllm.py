"""vLLM's own OpenAI server, without this project, to compare a fleet's answers with."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from support_client import FleetClient
from support_fleet import START_TIMEOUT_S
from support_servers import free_port

from benchmarks.peers.processes import running


@contextlib.contextmanager
def plain_vllm(model: str, logs: Path, *arguments: str, **environment: str) -> Iterator[FleetClient]:
    """`arguments`: of `vllm serve`. `logs`: a folder. Its processes have ended when this returns."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *arguments]
    with running(logs) as processes:
        processes.start("vllm", [*command, "--host", "127.0.0.1", "--port", str(port)], environment)
        processes.wait(f"{url}/health", timeout_s=START_TIMEOUT_S)
        client = FleetClient(url, "")
        yield client
        client.http.close()
