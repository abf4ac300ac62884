"""Two classes of requests: a load is the same alone and beside the other."""

from benchmarks.policy_classes import INTERACTIVE, PROFILE, both, of_seconds, of_worse_class
from orchestrator.simulator.settings import Settings, stack
from orchestrator.simulator.simulation import Simulation


def test_a_load_lasts_as_long_alone_and_beside_the_other():
    """The stretch is calm: its requests are fewer than at the mean rate."""
    interactive, batch = of_seconds("bursty", 40.0, 60.0, 0), of_seconds("heavy_tailed", 10.0, 60.0, 0)
    assert len(interactive.arrivals) < 0.8 * 40 * 60 and 59 < interactive.arrivals[-1].at <= 60
    merged = [arrival.at for arrival in both(interactive, batch).arrivals if arrival.ttft_slo_s is None]
    assert 59 < merged[-1] and merged == [arrival.at for arrival in interactive.arrivals][: len(merged)]


def test_what_the_batch_waits_for_is_not_what_interactive_requests_expect():
    """0.955 of the interactive ones are in time where the queue's waits are learned from both alike."""
    load = both(of_seconds("bursty", 35.0, 75.0, 1), of_seconds("heavy_tailed", 35.0, 75.0, 1))
    settings = Settings(prefill=1, decode=7, profile=PROFILE, stack=stack("ours:fixed"), slo=INTERACTIVE)
    assert of_worse_class(Simulation(settings, load).run()).attained > 0.965
