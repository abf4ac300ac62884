"""`orchestrator plan` as a user meets it: a table, a sentence, a picture; from a trace, or from a running fleet."""

import http.server
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from support_info import fleet_of, worker_info
from typer.testing import CliRunner

from orchestrator.cli.trial.compare import profile_command
from orchestrator.cli.trial.live import live_profile
from orchestrator.cli.trial.plan import _size_sentence, plan_command
from orchestrator.config.access import OPERATOR_KEY
from orchestrator.config.settings import ConfigError
from orchestrator.frontend.dashboard.history import overview
from orchestrator.simulator.engine.profile import PROFILES, load_profile
from orchestrator.simulator.plan import FIXED, FleetOption
from orchestrator.simulator.settings import Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Arrival, Load
from orchestrator.types import KVCounters, WorkerInfo, WorkerLoad

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(plan_command)
LOAD = ["--trace", "agents", "--profile", "h100-llama-8b", "--workers", "2", "--requests", "200"]


def run(*args: str):
    return CliRunner().invoke(app, args)


@pytest.mark.parametrize(
    ("workers", "said"),
    [(1, "1 worker serves your load; disaggregation"), (2, "2 workers, all aggregated, serve your load; disag")],
)
def test_one_worker_is_no_plural(workers, said):
    apart, together = FleetOption(1, 1, FIXED), FleetOption(0, workers, FIXED)
    assert _size_sentence(2.0, 4, apart, together).startswith(said)


def test_a_rate_is_answered_by_a_table_a_sentence_and_a_picture(tmp_path):
    png = tmp_path / "plan.png"
    result = run(*LOAD, "--rate", "2", "--plot", str(png))
    assert result.exit_code == 0, result.output
    assert "0P2D (aggregated)" in result.stdout and "automatic, from 1P1D" in result.stdout
    assert "dynamo_cost, 1P1D" in result.stdout and "your load; " in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_goodput_is_shown_for_each_option(tmp_path):
    few = [*LOAD, "--requests", "50"]  # the last value holds
    result = run(*few, "--rate", "goodput", "--plot", str(tmp_path / "plan.png"), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert all(list(way["goodput"]) == ["90%", "95%", "99%"] for way in found["ways"])
    assert "requests/s, aggregated" in found["answer"]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--workers", "2"], "expected --trace and --profile"),
        ([*LOAD, "--rate", "many"], "--rate: expected more than 0 requests per second, or goodput, got 'many'"),
        (["--workers", "2", "--live", "http://127.0.0.1:9"], "name a frontend of a running fleet"),
    ],
)
def test_mistakes_are_one_line(args, why, tmp_path):
    result = run(*args, "--plot", str(tmp_path / "plan.png"))
    assert isinstance(result.exception, ConfigError) and why in str(result.exception)


def fleet_page(*infos: WorkerInfo, link_bytes_per_s: float = 0.0) -> dict[str, Any]:
    """`/fleet` of workers of which the first has this link."""
    fleet = fleet_of(*infos)
    kv = KVCounters(link_bytes_per_s=link_bytes_per_s)
    fleet.take_load(WorkerLoad(infos[0].id, 1, infos[0].blocks_total, 0, 0, 0, 0, 0.0, kv=kv), 0.0)
    return overview("m", fleet, SimpleNamespace(depth=None))


@pytest.fixture
def frontend():
    """A real server with the pages of a frontend."""
    pages = {
        "key": "",
        "/fleet": fleet_page(worker_info("d0", blocks_total=2000), worker_info("d1", blocks_total=3000)),
        "/predictions": {
            "speed": {"prefill_s": 0.012, "prefill_s_per_token": 1e-4, "step_s": 0.01, "step_s_per_sequence": 1e-4}
        },
        "/requests?latest=1000": {
            "requests": [
                {"arrived_at": 100.0 + n / 5, "prompt_tokens": 600, "cached_tokens": 100, "output_tokens": 20}
                for n in range(100)
            ]
        },
    }

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if pages["key"] and self.headers["authorization"] != f"Bearer {pages['key']}":
                self.send_error(401)
                return
            page = pages[self.path]
            if isinstance(page, list):  # those that share a port answer in turn
                page.append(page.pop(0))
                page = page[-1]
            body = json.dumps(page).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield pages, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_plan_uses_profile_and_load_of_running_fleet(frontend, tmp_path):
    pages, url = frontend
    args = ["--workers", "2", "--live", url, "--plot", str(tmp_path / "plan.png"), "--json"]
    found = json.loads(run(*args).stdout)
    assert {way["at"]["requests"] for way in found["ways"]} == {75}, "a quarter warms up"
    assert found["ways"][0]["at"]["profile"] == "live" and abs(found["ways"][0]["at"]["rate"] - 5) < 0.1
    pages["/predictions"] = {}
    result = run(*args)
    assert "no worker of the fleet has measured its engine" in str(result.exception)


ODD = {"block_size": 128, "max_num_seqs": 17, "max_num_batched_tokens": 1000, "max_model_len": 3000}
ODD |= {"adapter_slots": 3, "kv_bytes_per_token": 46_080}


def test_a_profile_of_a_running_fleet_has_what_its_smallest_engine_has(frontend):
    pages, url = frontend
    large, odd = worker_info("p0", blocks_total=700, block_size=16), worker_info("d0", blocks_total=90, **ODD)
    pages["/fleet"] = fleet_page(odd, worker_info("d1", blocks_total=91, **ODD), link_bytes_per_s=1.5e9)
    profile = live_profile(url)
    assert {name: getattr(profile, name) for name in ODD} == ODD
    assert (profile.blocks, profile.link_bytes_per_s) == (90, 1.5e9) and "the link is measured" in profile.origin

    load = Load("one", [Arrival(0.0, 2900, 99)])
    run = Simulation(Settings(prefill=0, decode=1, profile=profile, stack=stack("ours")), load).run()
    assert run.jobs[0].outcome == "ok", "it needs 24 blocks of 128 tokens: more than 90 of 16 have"
    assert run.workers["d0"].kv.total == 90 and run.workers["d0"].blocks_for(2900) == 23

    pages["/fleet"] = fleet_page(odd, large)
    base = load_profile(PROFILES / "h100-llama-8b.json")
    profile = live_profile(url)
    assert (profile.blocks, profile.block_size) == (700, 16), "more blocks, fewer tokens"
    assert profile.link_bytes_per_s == base.link_bytes_per_s
    assert f"the link is that of {base.name}, since no KV was sent" in profile.origin


def test_a_frontend_that_does_not_tell_what_its_engines_have_is_named(frontend):
    """As one of a release before it."""
    pages, url = frontend
    for worker in pages["/fleet"]["workers"]:
        del worker["kv_bytes_per_token"]
    with pytest.raises(ConfigError, match=f"{url}: no worker is there, or a frontend of an older release; give --pro"):
        live_profile(url)


def test_a_running_fleet_is_asked_with_the_operators_key(frontend, tmp_path, monkeypatch):
    pages, url = frontend
    pages["key"] = "secret"
    args = ["--workers", "2", "--live", url, "--plot", str(tmp_path / "plan.png"), "--json"]
    refused = run(*args)
    assert isinstance(refused.exception, ConfigError) and f"set {OPERATOR_KEY}" in str(refused.exception)
    monkeypatch.setenv(OPERATOR_KEY, "secret")
    assert run(*args).exit_code == 0


@pytest.mark.parametrize("more", [[], ["--trace", "code", "--requests", "40"]])
def test_a_fleet_of_several_models_is_asked_for_one_of_them(frontend, tmp_path, more):
    pages, url = frontend
    pages["/fleet"] = {"models": ["large", "small"]}
    refused = run("--workers", "2", "--live", f"{url}/", "--plot", str(tmp_path / "plan.png"), *more)
    assert isinstance(refused.exception, ConfigError)
    assert f"several models are there; name one: {url}/models/large, {url}/models/small" in str(refused.exception)


def test_a_profile_is_of_one_model_and_nothing_is_measured_before_it_is_named(frontend, tmp_path):
    pages, url = frontend
    pages["/v1/models"], pages["/fleet"] = {"data": [{"id": "large"}]}, {"models": ["large", "small"]}
    with pytest.raises(ConfigError, match=f"several models are there; name one: {url}/models/large"):
        profile_command(url, tmp_path / "profile.json")
