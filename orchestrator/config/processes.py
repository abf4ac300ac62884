"""The sections `frontend`, `launcher` and `logging` of the configuration: the fleet's processes but its workers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from orchestrator.config.values import Amount, Seconds, Text

Processes = Annotated[int, Meta(ge=1, le=1000)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class FrontendConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    host: Text = "127.0.0.1"
    port: Port = 8000  # 0 picks a free one
    # Processes that share the port. auto: by their CPU time and requests in flight, from 1 to `max_replicas`.
    replicas: Processes | Literal["auto"] = 1
    max_replicas: Processes = 8
    dashboard: bool = True  # the page /dashboard, and orders under /operator/
    otlp_endpoint: Text | None = None  # http://COLLECTOR:4317: OpenTelemetry spans of requests go there
    # What turns text into tokens. fastokens (`pip install fastokens`) gives the same for a small part of the CPU time.
    tokenizer_backend: Literal["huggingface", "fastokens"] = "huggingface"
    # Arguments of vLLM's OpenAI server, as `vllm serve` spells them without dashes: {tool_call_parser: hermes}
    server_args: dict[str, Any] = {}

    @property
    def most_replicas(self) -> int:
        return self.max_replicas if self.replicas == "auto" else self.replicas


class LauncherConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the fleet's processes run: on the launcher's machine, or on the nodes of a Ray cluster."""

    kind: Literal["local", "ray"] = "local"
    address: Text | None = None  # of the Ray cluster; default: RAY_ADDRESS, or the one that runs on this machine
    ray_auth: Literal["token", "none"] = "token"  # none: anybody who reaches the cluster can run programs on its nodes
    gpus_per_rank: Amount | None = None  # default: 1 where vLLM's CUDA build is installed
    restart_backoff_max_s: Seconds = 30.0  # the longest pause before a process is started again after a crash
    stop_timeout_s: Seconds = 10.0  # a process that was told to stop is killed after this


class LoggingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["text", "json"] = "text"  # json: one object a line
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"  # of our processes; vLLM's is VLLM_LOGGING_LEVEL
