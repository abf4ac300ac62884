"""Which arguments of vLLM's server `frontend.server_args` may hold, and the TLS settings among them.

A frontend is not `vllm serve`: what that does around the app is refused here, with what to use instead.
"""

from __future__ import annotations

import os
import ssl
from typing import Any

from orchestrator.config.access import read_api_keys
from orchestrator.config.settings import Config, ConfigError

MEDIA_CONNECTOR = "VLLM_MEDIA_CONNECTOR"  # vLLM's variable: what fetches the media that a request names by URL
_KEEPS_RESPONSES = "VLLM_ENABLE_RESPONSES_API_STORE"  # vLLM's variable: its server keeps what /v1/responses answers
_NO_ACCESS_LOG = "frontends write no access log; each request has a line of the logger pd.request"
_PARSER = "frontends parse HTTP with httptools, whose limits are fixed; limit headers in a proxy"
_SUPERVISOR = "the launcher supervises the fleet; remove it"
# What neither a frontend nor a worker is given, and what to use: both follow the fleet's own settings.
OF_FLEET = {
    "model": "use the key model",
    "served_model_name": "use the key served_model_name",
    "kv_transfer_config": "use the key kv.transfer",
    "shutdown_timeout": "use the key launcher.stop_timeout_s",
    "otlp_traces_endpoint": "use the key frontend.otlp_endpoint",
    "logging_config": "use the key logging.format",
    "log_config_file": "use the key logging.format",
    "log_level": "use the variable VLLM_LOGGING_LEVEL",
}
_REFUSED = {
    **OF_FLEET,
    "model_tag": "use the key model",
    "config": "write its content into frontend.server_args",
    "api_key": "use security.api_keys, which protect every path, or security.api_keys_file",
    "host": "use frontend.host",
    "port": "use frontend.port",
    "uds": "frontends listen on frontend.host and frontend.port; put a proxy before them",
    "grpc": "frontends speak HTTP only; remove it",
    "grpc_port": "frontends speak HTTP only; remove it",
    "api_server_count": "use frontend.replicas",
    "headless": "start workers by hand with prefill-worker and decode-worker",
    "h11_max_incomplete_event_size": _PARSER,
    "h11_max_header_count": _PARSER,
    "enable_ssl_refresh": "restart the frontends, one after the other, to use a new certificate",
    "disable_uvicorn_access_log": _NO_ACCESS_LOG,
    "disable_access_log_for_endpoints": _NO_ACCESS_LOG,
    "data_parallel_supervisor_port": _SUPERVISOR,
    "dp_supervisor_probe_interval_s": _SUPERVISOR,
    "dp_supervisor_probe_timeout_s": _SUPERVISOR,
    "dp_supervisor_probe_failure_threshold": _SUPERVISOR,
}
_TLS_FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_DEFAULT_LOG_LEVEL = "warning"


def check_server_args(config: Config) -> None:
    """Raises ConfigError for an argument that frontends cannot honour, and for TLS files that cannot be used."""
    arguments = config.frontend.server_args
    for name in arguments:
        if name in _REFUSED:
            raise ConfigError(f"frontend.server_args.{name}: is not for a frontend; {_REFUSED[name]}")
    level = arguments.get("uvicorn_log_level", _DEFAULT_LOG_LEVEL)
    if level not in _LOG_LEVELS:
        raise ConfigError(
            f"frontend.server_args.uvicorn_log_level: expected one of {', '.join(_LOG_LEVELS)}, got {level!r}"
        )
    for name in _TLS_FILES:
        path = arguments.get(name)
        if path is not None and not (isinstance(path, str) and os.access(path, os.R_OK) and os.path.isfile(path)):
            raise ConfigError(f"frontend.server_args.{name}: expected a file that can be read, got {path!r}")
    others = [name for name in arguments if name.startswith("ssl_") and name != "ssl_certfile"]
    if others and not uses_tls(config):
        raise ConfigError(f"frontend.server_args.{others[0]}: needs ssl_certfile, the server's certificate")
    if uses_tls(config):
        _check_tls(arguments)
    number = "one on each node" if config.launcher.kind == "ray" else config.frontend.replicas
    if number != 1 and os.environ.get(_KEEPS_RESPONSES, "0") not in ("", "0"):
        raise ConfigError(
            f"frontend.replicas: expected 1 with {_KEEPS_RESPONSES}, got {number}: what one frontend keeps is unknown "
            "to the others; unset the variable, or set this to 1, and launcher.kind to local"
        )
    try:
        read_api_keys(config.security)
    except (OSError, ValueError) as error:
        raise ConfigError(f"security.api_keys_file: expected a file of keys, one per line: {error}") from None


def uses_tls(config: Config) -> bool:
    """Whether frontends serve HTTPS."""
    return config.frontend.server_args.get("ssl_certfile") is not None


def needs_client_certificate(config: Config) -> bool:
    return uses_tls(config) and config.frontend.server_args.get("ssl_cert_reqs") == ssl.CERT_REQUIRED


def uvicorn_options(config: Config) -> dict[str, Any]:
    """The arguments that are uvicorn's, under uvicorn's names. `check_server_args` has accepted them."""
    arguments = config.frontend.server_args
    tls = {name: value for name, value in arguments.items() if name.startswith("ssl_") and value is not None}
    return {"log_level": arguments.get("uvicorn_log_level", _DEFAULT_LOG_LEVEL), **tls}


def _check_tls(arguments: dict[str, Any]) -> None:
    """Load everything as the server will. Raises ConfigError."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(arguments["ssl_certfile"], arguments.get("ssl_keyfile"), password=str)
        if (authorities := arguments.get("ssl_ca_certs")) is not None:
            context.load_verify_locations(authorities)
        if (ciphers := arguments.get("ssl_ciphers")) is not None:
            context.set_ciphers(ciphers)
        context.verify_mode = ssl.VerifyMode(arguments.get("ssl_cert_reqs", ssl.CERT_NONE))
    except (OSError, ValueError, TypeError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"frontend.server_args.ssl_certfile and the other ssl_ settings: {error}") from None
