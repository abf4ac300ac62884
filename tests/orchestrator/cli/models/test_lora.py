"""`orchestrator lora`: what a frontend answers, in one line with the mend. Real engines: `test_real_adapters.py`."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support_cli import orchestrator, refused

CARDS = {"data": [{"id": "m", "root": "/m", "parent": None}, {"id": "a", "root": "/a", "parent": "m"}]}
LOADED = (200, "Success", "text/plain")


class Frontend(ThreadingHTTPServer):
    """Answers each request with `answer`, and keeps what was asked."""

    answer: tuple[int, object, str] = LOADED

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, object]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Frontend

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append((self.path, json.loads(body) if body else None))
        status, said, kind = self.server.answer
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write((said if isinstance(said, str) else json.dumps(said)).encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    with Frontend() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def at(frontend: Frontend) -> tuple[str, str]:
    return "--url", f"http://127.0.0.1:{frontend.server_port}/models/m"


def test_adapters_are_added_removed_and_listed(frontend: Frontend) -> None:
    assert orchestrator("lora", "add", "a", "/a", "--replace", *at(frontend)).stdout == "a: added\n"
    assert orchestrator("lora", "remove", "a", *at(frontend)).stdout == "a: removed\n"
    added = orchestrator("lora", "add", "a", "/a", "--json", *at(frontend)).stdout
    removed = orchestrator("lora", "remove", "a", "--json", *at(frontend)).stdout
    assert [json.loads(added), json.loads(removed)] == [{"name": "a", "path": "/a"}, {"name": "a"}]
    frontend.answer = (200, CARDS, "application/json")
    listed = json.loads(orchestrator("lora", "list", "--json", *at(frontend)).stdout)
    assert listed == {"adapters": [{"name": "a", "path": "/a", "parent": "m"}]}
    assert "/a" in orchestrator("lora", "list", *at(frontend)).stdout
    loaded = {"lora_name": "a", "lora_path": "/a", "load_inplace": True}
    assert frontend.asked[:2] == [
        ("/models/m/v1/load_lora_adapter", loaded),
        ("/models/m/v1/unload_lora_adapter", {"lora_name": "a"}),
    ]


@pytest.mark.parametrize(
    ("status", "said", "line"),
    [
        (400, {"error": {"message": "worker-1: cannot read /a"}}, "worker-1: cannot read /a"),
        (404, {"error": {"message": "Not Found"}}, "start the fleet with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (404, {"error": {"message": "No adapter found for '/a'"}}, "No adapter found for '/a'"),
        (401, {"error": {"message": "no"}}, "wants the operator's key: set PD_OPERATOR_KEY"),
        (502, "<html>", "<html>"),
    ],
)
def test_what_a_frontend_refuses_is_told(frontend: Frontend, status: int, said: object, line: str) -> None:
    frontend.answer = (status, said, "application/json" if isinstance(said, dict) else "text/html")
    assert line in refused("lora", "add", "a", "/a", *at(frontend))


def test_a_frontend_that_does_not_answer_is_named() -> None:
    for command, mend in ((["add", "a", "/a"], "whether it was done is not known"), (["list"], "name a frontend of a")):
        line = refused("lora", *command, "--url", "http://127.0.0.1:9")
        assert "http://127.0.0.1:9: " in line and mend in line
