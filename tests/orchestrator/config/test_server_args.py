"""What vLLM's server takes is honoured by a frontend, or refused by name with the mend."""

import ssl
from contextlib import nullcontext
from pathlib import Path

import pytest
from support_tls import make_certificate

from orchestrator.config.engine_args import check_engine_args, to_command_line
from orchestrator.config.server_args import check_server_args, needs_client_certificate, uses_tls, uvicorn_options
from orchestrator.config.settings import Config, ConfigError, parse_config


def config(**server_args: object) -> Config:
    return parse_config({"model": "demo", "engine": "sim", "frontend": {"server_args": server_args}})


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"host": "0.0.0.0"}, "host: is not for a frontend; use frontend.host"),
        ({"port": 80}, "use frontend.port"),
        ({"uds": "/s"}, "frontend.host"),
        ({"api_server_count": 4}, "use frontend.replicas"),
        ({"h11_max_header_count": 10}, "httptools"),
        ({"enable_ssl_refresh": True}, "restart the frontends"),
        ({"disable_uvicorn_access_log": True}, "pd.request"),
        ({"model": "other"}, "use the key model"),
        ({"shutdown_timeout": 60}, "use the key launcher.stop_timeout_s"),
        ({"otlp_traces_endpoint": "http://h"}, "use the key frontend.otlp_endpoint"),
        ({"log_config_file": "l.json"}, "use the key logging.format"),
        ({"uvicorn_log_level": "loud"}, "expected one of critical, .* got 'loud'"),
        ({"ssl_certfile": "/no/such.pem"}, "ssl_certfile: expected a file that can be read, got '/no/such.pem'"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs: needs ssl_certfile"),
        ({"ssl_certfile": __file__}, "ssl_certfile and the other ssl_ settings: "),
    ],
)
def test_unsupported_server_arguments_are_refused(arguments, line):
    with pytest.raises(ConfigError, match=rf"^frontend\.server_args\..*{line}"):
        check_engine_args(config(**arguments))


def test_responses_are_kept_by_one_frontend_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM in the memory of its process: whoever asks for one reaches any frontend."""
    frontends: tuple[int | str, ...] = (1, 2, "auto")
    one, *several = [parse_config({"model": "m", "frontend": {"replicas": number}}) for number in frontends]
    on_ray = {"model": "m", "redis": {"url": "redis://h"}, "launcher": {"kind": "ray"}}  # one on each node
    several.append(parse_config(on_ray))
    for value, refused in ((None, False), ("0", False), ("1", True)):
        if value is not None:
            monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", value)
        check_server_args(one)
        for config in several:
            line = r"frontend\.replicas: expected 1 .* unset the variable"
            with pytest.raises(ConfigError, match=line) if refused else nullcontext():
                check_server_args(config)


def test_tls_and_log_level_reach_uvicorn(tmp_path: Path):
    certificate, key = make_certificate(tmp_path, "DNS:localhost")
    plain = config(uvicorn_log_level="debug")
    secure = config(ssl_certfile=str(certificate), ssl_keyfile=str(key), ssl_cert_reqs=int(ssl.CERT_REQUIRED))
    for each in (plain, secure):
        check_engine_args(each)
    assert uvicorn_options(plain) == {"log_level": "debug"} and not uses_tls(plain)
    assert uvicorn_options(secure) == {
        "log_level": "warning", "ssl_certfile": str(certificate), "ssl_keyfile": str(key), "ssl_cert_reqs": 2
    }  # fmt: skip
    assert uses_tls(secure) and needs_client_certificate(secure)


def test_lists_are_spread_repeated_or_json():
    line = to_command_line(
        {"keys": ["a", {"name": "b"}], "middleware": ["m", "n"], "origins": ["*"], "key": "one"},
        {"keys"},
        {"middleware"},
    )
    assert line == [
        "--keys", "a", '{"name":"b"}', "--middleware", "m", "--middleware", "n", "--origins", '["*"]', "--key", "one"
    ]  # fmt: skip
