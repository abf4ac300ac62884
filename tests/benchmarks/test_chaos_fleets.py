"""`benchmarks.chaos`: a soak makes faults that its fleet can have; clients ask less until a worker is idle."""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import threading
import time

from support_client import FleetClient
from support_fleet import ROOT

from benchmarks.chaos.load import Load, Questions, Seen
from benchmarks.chaos.redis_faults import QUEUE_KEYS
from benchmarks.chaos.soak import EVERYTHING, SPARING
from benchmarks.chaos.table import FAULTS


def test_a_queue_that_is_lost_has_lost_all_its_keys() -> None:
    sources = (file.read_text() for file in (ROOT / "orchestrator" / "store" / "lua" / "queue").glob("*.lua"))
    named = {name for source in sources for name in re.findall(r"prefix \.\. '(\w+)", source)}
    assert named - {"worker", "frontend", "wake"} == QUEUE_KEYS, "the registry's, and a channel"


def test_soak_of_simulated_engines_makes_no_fault_that_needs_real_ones() -> None:
    assert [name for name in {*EVERYTHING, *SPARING} if "sim" not in FAULTS[name].engines] == []


class Answering(http.server.BaseHTTPRequestHandler):
    running = most = 0
    count = threading.Lock()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        with Answering.count:
            Answering.running += 1
            Answering.most = max(Answering.most, Answering.running)
        time.sleep(0.02)
        with Answering.count:
            Answering.running -= 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: " + json.dumps({"choices": [{"text": "", "token_ids": [5]}]}).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        pass


def test_streams_ask_less_until_they_are_resumed() -> None:
    async def most_in(seconds: float) -> int:
        Answering.most = 0
        await asyncio.sleep(seconds)
        return Answering.most

    async def asked(url: str) -> list[int]:
        async with Load(FleetClient(url, ""), Questions([[1]], [[5]]), streams=3, seen=seen) as load:
            most = [await most_in(0.5)]
            load.ease()
            load.ease()
            await asyncio.sleep(0.2)  # what runs ends
            most.append(await most_in(0.3))
            load.ease()
            load.ease()
            await asyncio.sleep(0.2)
            most.append(await most_in(0.3))
            load.resume()
            most.append(await most_in(0.5))
        return most

    seen = Seen("")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert asyncio.run(asked(f"http://127.0.0.1:{server.server_address[1]}")) == [3, 1, 0, 3]
        server.shutdown()
    assert (seen.wrong, seen.errors.total()) == (0, 0) and seen.answers > 10
