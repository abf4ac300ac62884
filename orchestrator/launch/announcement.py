"""What the launcher says once a fleet is ready: where it is, and requests to try it with."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Mapping

import msgspec

from orchestrator.config.access import is_protected
from orchestrator.launch.console import Console
from orchestrator.launch.fleet_processes import FleetProcesses
from orchestrator.launch.host.run_folder import Ready, RunFolder

READY_FD = "PD_READY_FD"  # in the environment: the pipe of who waits for this. A file may find no room on the disk
_CURL_TOKENS = 24
_LONG_TOKENS = 768  # of a prompt that shows a remote prefill, where predicted times decide
_REPEATED = "{repeated}"  # stands for a shell's substitution in a JSON body


def announce(models: Mapping[str, FleetProcesses], device: str, folder: RunFolder, console: Console) -> None:
    """The last lines of a start: where the fleet is, and requests to try it with; of several models, the first."""
    fleet = next(iter(models.values()))
    config = fleet.config
    engine = "simulated engines: timed, not computed" if config.engine == "sim" else "vLLM"
    engine += f" on {device}" if config.engine != "sim" or config.launcher.kind != "local" else ""
    shapes = [f"{each.desired.prefill}P{each.desired.decode}D" for each in models.values()]
    names = [each.config.name_served for each in models.values()]
    ready = Ready(fleet.url, ", ".join(names), f"{', '.join(shapes)} ({engine})")
    console.stop_progress()
    console.say(f"Ready  {ready.url}  {'models' if len(models) > 1 else 'model'} {ready.model}  fleet {ready.fleet}")
    if config.security.operator_key is not None:
        console.say(f"Its pages and metrics need the operator's key: {folder.operator_key_path}")
    by_length = config.routing.remote_prefill_min_tokens
    console.say(f"A short prompt{'' if by_length is None else ' is prefilled where it is decoded'}:")
    protected = is_protected(config.security)
    console.say(_curl(ready.url, names[0], protected))
    if fleet.desired.prefill:
        console.say(f"A long one{'' if by_length is None else ' is prefilled by one worker and decoded by another'}:")
        console.say(_curl(ready.url, names[0], protected, sentences=(by_length or _LONG_TOKENS) // 3))
    console.flush()
    folder.note_ready(ready)
    if told_at := os.environ.get(READY_FD):  # last: `up --detach` returns once it is told, and shows no more
        with contextlib.suppress(OSError):  # who waited has ended
            os.write(int(told_at), msgspec.json.encode(ready) + b"\n")


def _curl(url: str, model: str, protected: bool, sentences: int = 0) -> str:
    """A chat request to paste into a shell, which puts a repeated sentence of four tokens in front of the question."""
    question = f"{_REPEATED}What is the capital of France?" if sentences else "What is the capital of France?"
    messages = [{"role": "user", "content": question}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": _CURL_TOKENS, "temperature": 0})
    repeat = f"$(printf 'You answer briefly. %.0s' $(seq {sentences}))"
    quoted = shlex.quote(body).replace(_REPEATED, f"""'"{repeat}"'""")
    trust = " --insecure" if url.startswith("https") else ""  # the certificate is hardly one of 127.0.0.1
    key = ' -H "authorization: Bearer $API_KEY"' if protected else ""
    return f"curl{trust} {url}/v1/chat/completions{key} -H 'content-type: application/json' -d {quoted}"
