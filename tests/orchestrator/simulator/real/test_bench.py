"""A run measures the times that users see, however the server answers; two servers are compared turn by turn."""

import json
import math
import re
import threading
import time
from asyncio import new_event_loop

import msgspec
import pytest
from support_openai import Server
from typer.testing import CliRunner

from orchestrator.cli.trial.bench import app, parse_rates
from orchestrator.cli.trial.compare import app as compare_app
from orchestrator.config.settings import ConfigError
from orchestrator.simulator.real import calibrate
from orchestrator.simulator.real.client import MeasureError, Target
from orchestrator.simulator.real.drive import Prompts, Run, Sent, closed_loop, open_loop
from orchestrator.simulator.real.figures import Ratio, figures, ratios
from orchestrator.simulator.real.page import _chart, page
from orchestrator.simulator.trace import Arrival, Load, at_rate, steady


def test_prompts_share_what_their_keys_say_and_nothing_else():
    prompts = Prompts(seed=1)
    first, second = (prompts.make(1300, (7, 8), 512, own) for own in (1, 2))
    assert len(first) == 1300 and first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:1030]
    assert prompts.make(600, (8, 7), 512)[:16] != first[:16]
    many = {tuple(prompts.make(16, own=own)) for own in range(20_000)}
    assert len(many) == 20_000, "no server answers one from another's cache"
    assert Prompts(seed=2).make(16, own=1) not in map(list, many)
    assert len(prompts.make(200_000)) == 200_000 and len(prompts.make(2)) == 2
    assert all(100 <= token < 10_000 for token in first)


@pytest.mark.parametrize("cut", [0, 1, 7])
async def test_tokens_are_counted_however_the_stream_is_cut(cut):
    async with Server(cut=cut) as server, Target(server.url) as target:
        timing = await target.complete([1, 2, 3], 5)
    assert (timing.output_tokens, len(timing.gaps_s), timing.cached_tokens) == (5, 4, 3)


async def test_last_usage_of_stream_counts():
    """vLLM sends the usage with every event if started with `--enable-force-include-usage`."""
    async with Server() as server, Target(server.url) as target:
        server.telling = True
        timing = await target.complete([1, 2, 3], 40)
    assert timing.output_tokens == 40


async def test_times_are_the_servers():
    async with Server(first_s=0.2, gap_s=0.05) as server, Target(server.url) as target:
        timing = await target.complete([1, 2, 3], 5)
    assert timing.ttft_s >= 0.2 and timing.tpot_s >= 0.05
    assert timing.total_s == pytest.approx(timing.ttft_s + 4 * timing.tpot_s)


@pytest.mark.parametrize(("broken", "said"), [("status", "429"), ("stream", "broke off"), ("event", "engine died")])
async def test_incomplete_answer_is_an_error(broken, said):
    async with Server(broken=broken) as server, Target(server.url) as target:
        with pytest.raises(MeasureError, match=said):
            await target.complete([1], 3)
        run = await closed_loop(target, steady(4, 8, 2), 2, Prompts())
    seen = figures(run, 1.0, 1.0)
    assert (seen.errors, seen.attained, seen.requests_per_s) == (4, 0.0, 0.0)
    assert any(said in reason for reason in seen.reasons)


async def test_a_closed_loop_has_so_many_users_and_an_open_one_follows_its_clock():
    async with Server(first_s=0.1) as server, Target(server.url) as target:
        run = await closed_loop(target, steady(12, 8, 2), 3, Prompts())
        assert server.most_at_once == 3 and len(run.sent) == 12 and run.users == 3
        server.most_at_once = 0
        load = Load("burst", [Arrival(0.0, 8, 2)] * 6 + [Arrival(0.5, 8, 2)])
        run = await open_loop(target, load, Prompts())
        assert server.most_at_once == 6, "nobody waits for an answer"
    assert run.sent[-1].at_s >= 0.5 and run.rate == load.rate


class SlowPrompts:
    def make(self, tokens: int, keys: tuple[int, ...] = (), unit_tokens: int = 0, own: int = 0) -> list[int]:
        time.sleep(0.1)
        return [1] * tokens


async def test_open_loop_latency_counts_from_scheduled_arrival():
    async with Server() as server, Target(server.url) as target:
        run = await open_loop(target, Load("at once", [Arrival(0.0, 8, 2)] * 5), SlowPrompts())
    waited = sorted(sent.timing.ttft_s for sent in run.sent if sent.timing)
    assert waited[0] >= 0.1 and waited[-1] >= 0.5 and run.late_s >= 0.5
    assert figures(run, 1.0, 1.0).client_was_the_bottleneck


def made(ttfts: list[float], span_s: float = 10.0, errors: int = 0, rate: float | None = None) -> Run:
    from orchestrator.simulator.real.client import Timing

    sent = [Sent(0.0, Timing(100, 11, ttft, 0.01, [0.01] * 10)) for ttft in ttfts]
    return Run("u", "l", sent + [Sent(0.0, None, "x")] * errors, span_s, client_cpu_s=1.0, rate=rate, users=1)


def test_goodput_counts_answers_within_both_objectives():
    seen = figures(made([0.1] * 8 + [3.0] * 2, errors=10), ttft_s=1.0, tpot_s=0.1)
    assert (seen.attained, seen.goodput, seen.requests_per_s) == (0.4, 0.8, 1.0)
    assert (seen.ttft.p50, seen.ttft.p90, seen.ttft.max) == (0.1, 3.0, 3.0)
    assert figures(made([0.1]), 1.0, 0.001).attained == 0.0
    assert not seen.client_was_the_bottleneck and figures(made([0.1], 1.0), 1.0, 0.1).client_was_the_bottleneck


def test_servers_are_compared_turn_by_turn():
    slow, fast = ([figures(made([ttft * n]), 9.0, 9.0) for n in (1, 2, 3)] for ttft in (0.4, 0.1))
    by_name = {ratio.name: ratio for ratio in ratios(slow, fast)}
    assert by_name["TTFT P50"].median == by_name["TTFT P50"].least == pytest.approx(4.0)
    assert by_name["requests/s"].median == 1.0 and by_name["requests/s"].more_is_better


def test_each_rate_is_compared_by_itself():
    seen = [[figures(made([ttft], rate=rate), 9.0, 9.0) for rate in (1.0, 2.0)] for ttft in (0.4, 0.1)]
    seen[0][1] = figures(made([0.05], rate=2.0), 9.0, 9.0)
    found = [(r.rate, pytest.approx(r.median), r.least == r.most) for r in ratios(*seen) if r.name == "TTFT P50"]
    assert found == [(1.0, 4.0, True), (2.0, 0.5, True)]


def test_server_without_answers_has_no_latency():
    dead, alive = figures(made([], errors=10), 9.0, 9.0), figures(made([0.1]), 9.0, 9.0)
    assert math.isnan(dead.ttft.p50) and msgspec.json.decode(msgspec.json.encode(dead))["ttft"]["p50"] is None
    compared = {r.name: r.median for r in ratios([dead, alive], [alive, alive])}
    assert compared["requests/s"] == 0.5 and compared["goodput"] == 0.5
    assert not [name for name in compared if name.startswith(("TTFT", "TPOT"))]


def test_a_load_of_one_size_keeps_the_rate_asked_for():
    load = at_rate(steady(500, 100, 10), 20.0)
    assert load.rate == pytest.approx(20.0) and {a.prompt_tokens for a in load.arrivals} == {100}


@pytest.mark.parametrize("text", ["a", "0", "1,-2", ""])
def test_bad_rates_are_refused(text):
    with pytest.raises(ConfigError, match="--rate"):
        parse_rates(text)


@pytest.fixture
def servers():
    """A slow and a fast server, which run in a thread of their own."""
    loop, slow, fast = new_event_loop(), Server(first_s=0.2), Server()
    loop.run_until_complete(slow.__aenter__())
    loop.run_until_complete(fast.__aenter__())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield slow, fast
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_the_command_compares_two_servers_and_saves_what_it_saw(servers, tmp_path):
    slow, fast = servers
    files = ["--json", str(tmp_path / "b.json"), "--html", str(tmp_path / "b.html")]
    size = ["--requests", "8", "--users", "4", "--prompt-tokens", "20", "--output-tokens", "3", "--turns", "2"]
    done = CliRunner().invoke(app, [slow.url, "--against", fast.url, *size, *files])
    assert done.exit_code == 0, done.output
    assert "first server over second" in done.output
    saved = json.loads((tmp_path / "b.json").read_text())
    assert [run["url"] + "/" for run in saved["runs"]] == [slow.url, fast.url] * 2
    ratio = next(ratio for ratio in saved["ratios"] if ratio["name"] == "TTFT P50")
    assert ratio["least"] > 1
    assert (tmp_path / "b.html").read_text().count('"dash":"solid"') == 12
    prompts = [tuple(prompt[:8]) for server in servers for prompt in server.prompts if len(prompt) == 20]
    assert len(set(prompts)) == len(prompts) == 32, "no prompt was asked twice"


def test_the_command_tries_several_rates(servers):
    done = CliRunner().invoke(app, [servers[1].url, "--requests", "6", "--rate", "20,40", "--load", "code"])
    assert done.exit_code == 0, done.output
    assert "20/s" in done.output and "40/s" in done.output


def test_results_before_server_loss_are_shown(servers, tmp_path):
    slow, fast = servers
    fast.gone_after = 3
    size = ["--requests", "4", "--users", "4", "--prompt-tokens", "20", "--output-tokens", "3", "--turns", "4"]
    saved = tmp_path / "b.json"
    done = CliRunner().invoke(app, [slow.url, "--against", fast.url, *size, "--json", str(saved)])
    assert isinstance(done.exception, ConfigError) and str(done.exception).startswith("stopped after 4 of 8 runs: ")
    assert "TTFT P50" in done.output and len(json.loads(saved.read_text())["runs"]) == 4


def test_a_second_server_that_is_not_there_is_told_before_the_first_has_load(servers):
    done = CliRunner().invoke(app, [servers[1].url, "--against", "http://127.0.0.1:1", "--requests", "4"])
    assert isinstance(done.exception, ConfigError) and "127.0.0.1:1: no OpenAI server" in str(done.exception)
    assert servers[1].prompts == []


@pytest.mark.parametrize(
    ("least", "most", "more_is_better", "better"),
    [
        (1.2, 1.5, True, "first"),
        (1.2, 1.5, False, "second"),
        (0.5, 0.9, True, "second"),
        (0.5, 0.9, False, "first"),
        (0.9, 1.2, True, "-"),
        (1.001, 1.004, True, "-"),  # a server compared with itself, by luck
        (0.995, 0.999, True, "-"),
    ],
)
def test_a_server_is_better_where_every_turn_says_so(least, most, more_is_better, better):
    assert Ratio("x", None, 1.0, least, most, more_is_better).better == better


def test_each_curve_of_the_page_can_be_told_from_the_others():
    run = made([0.1], rate=2.0)
    runs = [(run, figures(run, 1.0, 1.0))] * 3
    shown = page("t", [["server"], ["u"]], runs, [])
    names = ("u 2\\u002fs", "u 2\\u002fs, turn 2", "u 2\\u002fs, turn 3")
    assert all(shown.count(f'"name":"{name}"') == 3 for name in names)
    curves = [(f"c{n}", [(1.0, 0.5), (2.0, 1.0)]) for n in range(14)]
    lines = re.findall(r'"line":\{"color":"(\S+?)","dash":"(\S+?)"\}', _chart("t", "s", curves))
    assert len(set(lines)) == 14


def test_a_profile_is_measured_and_compared_with_the_clients_key(servers, tmp_path, monkeypatch):
    _, fast = servers
    fast.key, measured = "secret", tmp_path / "p.json"
    profile = ["profile", "--url", fast.url, "--out", str(measured), "--lengths", "8,16"]
    compare = ["compare", "--url", fast.url, "--trace", "code", "--rate", "20", "--seconds", "0.5"]
    compare += ["--profile", "h100-llama-8b", "--out", str(tmp_path / "c.json")]
    assert "no OpenAI server answers" in str(CliRunner().invoke(compare_app, profile).exception)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr(calibrate, "MEASURE_S", 0.05)
    monkeypatch.setattr(calibrate, "PAUSE_S", 0.01)
    done = CliRunner().invoke(compare_app, profile)
    assert done.exit_code == 0 and "does not tell what its engines have" in done.output, done.output
    assert measured.exists() and CliRunner().invoke(compare_app, compare).exit_code == 0


def test_a_server_that_answers_nothing_is_one_line(servers):
    servers[1].broken = "status"
    done = CliRunner().invoke(app, [servers[1].url, "--requests", "4"])
    assert isinstance(done.exception, ConfigError) and "429" in str(done.exception)
