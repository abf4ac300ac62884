"""`benchmarks.chaos`: an unready fleet is an error, not a fleet; and a soak makes faults that its fleet can have."""

from __future__ import annotations

import http.server
import threading

import pytest
from support_client import FleetFailed

from benchmarks.chaos.fleets import wait_ready
from benchmarks.chaos.soak import EVERYTHING, SPARING
from benchmarks.chaos.table import FAULTS
from orchestrator.wire.addresses import free_ports


class Starting(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        Starting.asked += 1
        self.send_response(200 if Starting.asked > 3 else 503)
        self.end_headers()
        self.wfile.write(b"no worker decodes")

    def log_message(self, *_: object) -> None:
        pass


def test_unready_fleet_raises_with_last_answer() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Starting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(FleetFailed, match=f"after 0 s {url}/ready answered 503: no worker decodes"):
            wait_ready(url, timeout_s=0)
        wait_ready(url)
        assert Starting.asked == 4
        server.shutdown()


def test_silent_frontend_raises() -> None:
    with pytest.raises(FleetFailed, match="/ready did not answer: ConnectError"):
        wait_ready(f"http://127.0.0.1:{next(free_ports('127.0.0.1'))}", timeout_s=0)


def test_soak_of_simulated_engines_makes_no_fault_that_needs_real_ones() -> None:
    assert [name for name in {*EVERYTHING, *SPARING} if "sim" not in FAULTS[name].engines] == []
