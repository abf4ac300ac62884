"""Trace readers: two formats, and errors that name file and line."""

import msgspec
import pytest

from orchestrator.config.settings import ConfigError
from orchestrator.simulator.engine.profile import load_profile
from orchestrator.simulator.loads import synthetic
from orchestrator.simulator.settings import stack
from orchestrator.simulator.trace import Arrival, Load, at_rate, first, read_trace, repeated, scaled

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
{"timestamp": 0, "input_length": 100, "output_length": 0, "hash_ids": [4]}
{"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [1, 9]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def write(folder, text, name="trace"):
    path = folder / name
    path.write_text(text)
    return path


def test_mooncake(tmp_path):
    load = read_trace(write(tmp_path, MOONCAKE))
    assert load.unit_tokens == 512
    assert sorted(a.keys for a in load.arrivals) == [(), (1,), (1, 2)]  # whole blocks only
    early = [a.at for a in load.arrivals if a.at < 3.0]
    assert len(set(early)) == 2 and all(0 <= at < 3 for at in early)  # a burst is spread over its tick
    assert min(a.output_tokens for a in load.arrivals) == 1


def test_azure(tmp_path):
    load = read_trace(write(tmp_path, AZURE))
    assert [(a.prompt_tokens, a.output_tokens) for a in load.arrivals] == [(374, 44), (396, 109)]
    assert load.arrivals[0].at == 0 and load.arrivals[1].at == pytest.approx(4.314579, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (MOONCAKE.replace('"input_length": 600', '"input_length": "x"'), "line 3"),
        (MOONCAKE.replace('"output_length": 5, ', ""), "line 1"),
        (AZURE.replace("396", "many"), "line 3"),
        (AZURE.replace(",374,44", ""), "line 2"),
        (AZURE.replace("GeneratedTokens", "Tokens"), "line 1"),
        ("hello\n", "line 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
    ],
)
def test_a_malformed_trace_is_named_by_file_and_line(tmp_path, text, line):
    path = write(tmp_path, text, "bad.csv")
    with pytest.raises(ConfigError, match=rf"bad\.csv.*{line}"):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*: cannot be read \(No such file or directory\); name"):
        read_trace(tmp_path / "nowhere")


def test_loads_can_be_squeezed_cut_and_repeated():
    load = synthetic("heavy_tailed", 500, seed=1)
    assert at_rate(load, 20).rate == pytest.approx(20)
    assert len(first(load, 10).arrivals) == 10
    twice = repeated(load, 2)
    assert len(twice.arrivals) == 1000 and twice.rate == pytest.approx(load.rate, rel=0.01)
    keyed = Load("keyed", [Arrival(float(n), 600, 1, (n,)) for n in range(3)], 512)
    assert [a.keys for a in repeated(keyed, 2).arrivals] == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert synthetic("heavy_tailed", 500, seed=1) == load and synthetic("heavy_tailed", 500, seed=2) != load


def test_a_piece_of_a_longer_trace_begins_with_its_first_request(tmp_path):
    line = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [1]}\n'
    load = read_trace(write(tmp_path, "".join(line % (3_600_000 + 3000 * n) for n in range(10))))
    assert 0 <= load.arrivals[0].at < 3 and load.arrivals[-1].at < 33
    twice = repeated(load, 2).arrivals
    assert twice[10].at - twice[9].at < 10


def test_synthetic_loads_can_be_cut_and_scaled():
    """Think times and bursts have the same seconds at every rate."""
    load = synthetic("chat", 400)
    changed = first(scaled(load, 0.5), 300)
    fast, squeezed = at_rate(changed, 10.0), at_rate(msgspec.structs.replace(changed, at=None), 10.0)
    assert (
        len(fast.arrivals) == 300
        and fast.arrivals[-1].prompt_tokens < 0.6 * at_rate(load, 10.0).arrivals[299].prompt_tokens
    )
    assert [a.at for a in fast.arrivals] == [a.at for a in at_rate(load, 10.0).arrivals[:300]]
    assert [a.at for a in fast.arrivals] != [a.at for a in squeezed.arrivals]


def test_synthetic_load_without_requests_is_refused():
    """With only four calls of agents, some seeds have none within the load's time."""
    made, refused = [], []
    for seed in range(40):
        try:
            made.append(at_rate(synthetic("agents", 4, seed), 0.5))
        except ConfigError as error:
            refused.append(str(error))
    assert made and all(load.arrivals for load in made)
    assert refused and all("load agents: " in why and "ask for more" in why for why in refused)


def test_bursts_last_as_long_at_any_rate():
    """The busiest ten seconds have far more arrivals than the mean: a burst has four times the rate of the calm."""
    for rate in (5, 50):
        load = at_rate(synthetic("bursty", 200 * rate, seed=3), rate)
        assert load.rate == pytest.approx(rate, rel=0.5)
        tens = [0] * (int(load.arrivals[-1].at / 10) + 1)
        for arrival in load.arrivals:
            tens[int(arrival.at / 10)] += 1
        assert max(tens) > 1.5 * len(load.arrivals) / len(tens)


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_sessions_grow_by_prompt_and_answer(name):
    load = at_rate(synthetic(name, 2000, seed=1), 20)
    assert len(load.arrivals) == 2000 and load.rate == pytest.approx(20, rel=0.15)
    # The rate does not squeeze think times, so most requests continue an earlier one.
    seen: set[int] = set()
    continued = 0
    for arrival in load.arrivals:
        assert len(arrival.keys) <= arrival.prompt_tokens // load.unit_tokens
        continued += bool(seen.intersection(key for key in arrival.keys if key >= 1_000_000))
        seen.update(arrival.keys)
    assert continued > 500


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["chat", "agents", "changing", "bursty"])
def test_a_rate_at_which_a_load_would_never_be_made_is_refused(name):
    load = synthetic(name, 60)
    if name != "bursty":  # the others begin in the middle of sessions, of which there are more at a higher rate
        with pytest.raises(ConfigError, match=r"^rate: expected at most .* got 1e\+09"):
            at_rate(load, 1e9)
    with pytest.raises(ConfigError, match="^rate: expected at least .* longer than 1e"):
        at_rate(load, 1e-12)


def test_a_load_that_takes_weeks_by_itself_can_be_slowed_down_too():
    """By as much as the search for a fleet's goodput does."""
    load = Load("weeks", [Arrival(at, 100, 10) for at in (0.0, 1e6, 2e6)])
    for slower in (1, 64 / 0.8):
        assert at_rate(load, load.rate / slower).arrivals[-1].at == pytest.approx(2e6 * slower)
    with pytest.raises(ConfigError, match="^rate: expected at least 1e-08 .* longer than 3e"):
        at_rate(load, 1e-9)


def test_unknown_names_are_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="bursty"):
        synthetic("calm", 5)
    with pytest.raises(ValueError, match="kv_prefix"):
        stack("best")
    with pytest.raises(ConfigError, match=r"p\.json.*step"):
        load_profile(write(tmp_path, '{"name": "x", "step": 1}', "p.json"))


def test_a_changing_load_has_a_phase_of_each_kind_and_no_prefix_of_two():
    load = at_rate(synthetic("changing", 2100), 10)
    phase_s = 100.0
    phases = [[a for a in load.arrivals if n * phase_s <= a.at < (n + 1) * phase_s] for n in range(3)]
    assert sum(map(len, phases)) == len(load.arrivals)
    assert [len(phase) for phase in phases] == [pytest.approx(count, rel=0.15) for count in (1000, 700, 400)]
    assert not any(a.keys for a in phases[1]), "code shares nothing"
    chat, agents = ({key for a in phase for key in a.keys} for phase in (phases[0], phases[2]))
    assert chat and agents and not chat & agents
