"""A whole fleet with keys and HTTPS: what strangers get at each of its ports, and where its secrets are not."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support_fleet import ROOT, RunningFleet, descendants, running_fleet
from support_here import as_main, run_here
from support_redis import Server
from support_tls import make_certificate

from orchestrator.cli.join import Token
from orchestrator.frontend.access import OPEN
from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.process.parent import EXIT_AGAIN

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CLIENT_KEY, NEXT_KEY = "client-key-of-this-test", "next-key-of-this-test"
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "api-keys"
    file.write_text(f"{CLIENT_KEY}\n")
    return file


@pytest.fixture(scope="module")
def fleet(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(certificate))  # httpx trusts it
        settings = [
            f"security.api_keys_file={keys}",
            "limits.concurrent_per_key=4",
            f"frontend.server_args={{ssl_certfile: {certificate}, ssl_keyfile: {key}}}",
            "workers.prefill.replicas=1",
            "workers.decode.replicas=1",
        ]
        with running_fleet("sim-2p2d.yaml", *settings, api_key=CLIENT_KEY) as running:
            yield running


def operator_key(fleet: RunningFleet) -> str:
    path = RunFolder(fleet.namespace).operator_key_path
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    return path.read_text()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_of_the_server_but_health_needs_a_key(fleet: RunningFleet) -> None:
    operator = bearer(operator_key(fleet))
    routes = fleet.http.get("/openapi.json", headers=operator).json()["paths"]
    assert len(routes) > 20 and "/v1/chat/completions" in routes
    with httpx.Client(base_url=fleet.url) as stranger:
        for path in [*routes, "/metrics", "/fleet", "/predictions", "/docs"]:
            for method in ("GET", "POST", "OPTIONS"):
                answered = stranger.request(method, path.replace("{", "").replace("}", ""))
                assert (answered.status_code != 401) == (path in OPEN), (method, path, answered.status_code)
        assert stranger.get("/ready").status_code == 200
    for path in ("/fleet", "/metrics", "/predictions"):
        assert fleet.http.get(path).status_code == 401  # a client is no operator
        assert fleet.http.get(path, headers=operator).status_code == 200
    assert fleet.http.post("/v1/chat/completions", json={"model": fleet.model, **ASKED}).status_code == 200


def test_commands_on_this_machine_use_the_operators_key(fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = fleet.cli("status", "--json")
    assert '"blocks_free":null' not in shown.stdout.replace(" ", ""), "a frontend answered, not the registry"
    monkeypatch.setenv("PD_OPERATOR_KEY", "wrong")
    refused = fleet.cli("status", "--json")
    assert '"blocks_free":null' in refused.stdout.replace(" ", "") and "set PD_OPERATOR_KEY" in refused.stderr


def test_a_key_is_limited_by_what_its_requests_make_while_they_run(fleet: RunningFleet) -> None:
    """Two prompts in two choices each are all that this key may make at once."""

    def answered(prompts: int, n: int, stream: bool = False) -> httpx.Response:
        body = {"model": fleet.model, "prompt": ["Hello"] * prompts, "n": n, "max_tokens": 4, "stream": stream}
        return fleet.http.post("/v1/completions", json=body)

    assert answered(2, 2).status_code == answered(4, 1, stream=True).status_code == 200
    for prompts, n, stream in ((5, 1, False), (3, 2, True), (1, 5, False)):
        refused = answered(prompts, n, stream)
        assert refused.status_code == 400, refused.text
        assert f"this request makes {prompts * n} completions" in refused.json()["error"]["message"]
    long = {"model": fleet.model, "prompt": ["Hello"], "n": 3, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with fleet.http.stream("POST", "/v1/completions", json=long) as running:
        assert running.status_code == 200, running.read()
        lines = running.iter_lines()
        first = next(lines)
        assert answered(1, 1).status_code == 200
        for refused in (answered(2, 1), answered(1, 2, stream=True)):
            assert refused.status_code == 429, (first, list(lines)[-5:], refused.text)
            assert refused.headers["retry-after"] == "1" and "limits.concurrent_per_key" in refused.text
        assert fleet.http.get("/v1/models").status_code == 200
    fleet.until(lambda: answered(2, 2).status_code == 200, "the key is free when its client has gone")


def test_strangers_get_and_leave_nothing_at_any_port(fleet: RunningFleet) -> None:
    ports = fleet.listening()
    workers = {port: process for port, process in ports if "workers.main" in " ".join(process.cmdline())}
    assert len(workers) == 2 * 3  # requests, load reports, KV messages of the simulated engine
    before = {process.pid: process.num_fds() for process in workers.values()}
    start = b"\xff" + bytes(8) + b"\x7f\x03\x01"  # of ZMTP
    greetings = [start + name.ljust(20, b"\0") + bytes(32) for name in (b"NULL", b"CURVE")]
    for address in workers:
        for greeting in greetings:
            with socket.create_connection(address, timeout=5) as stranger:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    stranger.sendall(greeting + b"\x06" + (1 << 32).to_bytes(8, "big") + bytes(10_000))
                    heard = stranger.recv(65_536)
                    assert fleet.model.encode() not in heard and b"load" not in heard
    for process in workers.values():
        fleet.until(lambda process=process: process.num_fds() <= before[process.pid], "its descriptors are free again")
    assert fleet.http.post("/v1/chat/completions", json={"model": fleet.model, **ASKED}).status_code == 200


def test_plain_http_is_not_answered_where_https_is(fleet: RunningFleet) -> None:
    with pytest.raises(httpx.HTTPError), httpx.Client() as plain:
        plain.get(fleet.url.replace("https", "http") + "/health")


def test_keys_are_in_no_command_line_log_or_page(fleet: RunningFleet) -> None:
    secrets = [CLIENT_KEY, operator_key(fleet)]
    pages = [
        fleet.http.get(path, headers=bearer(secrets[1])).text for path in ("/fleet", "/metrics", "/v1/models", "/ready")
    ]
    shown = [*pages, *fleet.log, *fleet.process_lines()]
    for pid in descendants(fleet.process.pid):
        with contextlib.suppress(OSError):
            shown.append(Path(f"/proc/{pid}/cmdline").read_text())
    assert not [line for line in shown for secret in secrets if secret in line]
    files = [path for path in RunFolder(fleet.namespace).path.rglob("*") if path.is_file()]
    holding = [path for path in files if any(secret in path.read_text(errors="replace") for secret in secrets)]
    assert holding and not [path for path in holding if path.stat().st_mode & 0o077]


def test_a_key_is_exchanged_while_the_fleet_runs(fleet: RunningFleet, keys: Path) -> None:
    """Last in this file: the fleet's key is another one afterwards."""
    new = keys.with_suffix(".new")
    new.write_text(f"{CLIENT_KEY}\n{NEXT_KEY}\n")

    def codes() -> list[int]:
        return [fleet.http.get("/v1/models", headers=bearer(key)).status_code for key in (CLIENT_KEY, NEXT_KEY)]

    os.replace(new, keys)
    fleet.until(lambda: codes() == [200, 200], "both keys are valid")
    keys.write_text(f"{NEXT_KEY}\n")
    fleet.until(lambda: codes() == [401, 200], "the old key is not valid any more")


@pytest.mark.parametrize(
    "module", ["orchestrator.frontend.server --redis redis://127.0.0.1:1 --config", "orchestrator.cli.main up"]
)
def test_nothing_starts_that_would_unpickle_messages(module: str) -> None:
    config = str(ROOT / "configs" / "sim-2p2d.yaml")
    ended = run_here(as_main(*module.split(), config), VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    assert ended.returncode == 2
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION: messages between hosts are never unpickled" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_frontend_whose_redis_does_not_answer_yet_is_to_be_started_again() -> None:
    config = str(ROOT / "configs" / "sim-2p2d.yaml")
    options = ["--port", "0", "--redis", "redis://127.0.0.1:1", "--config", config]
    ended = run_here(as_main("orchestrator.frontend.server", *options))
    assert ended.returncode == EXIT_AGAIN, ended.stderr
    assert "Redis at redis://127.0.0.1:1 cannot be used" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "module",
    [
        "orchestrator.cli.main up {config} --set namespace=refused --set frontend.port=0 --set redis.url={url}",
        "orchestrator.frontend.server --port 0 --redis {url} --config {config}",
        "workers.main decode --redis {url} --config {config}",
        "orchestrator.cli.main worker --role decode",
    ],
)
def test_nothing_is_started_again_that_its_redis_refuses(module: str, server: Server) -> None:
    url = server.url.replace("redis://", "redis://nobody:wrong@")
    command = module.format(url=url, config=ROOT / "configs" / "sim-2p2d.yaml")
    ended = run_here(as_main(*command.split()), PD_JOIN=Token(url, "default").encode())
    assert ended.returncode == 2, ended.stderr
    assert "cannot be used: invalid username-password pair" in ended.stderr and "Traceback" not in ended.stderr
