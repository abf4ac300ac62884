"""Two classes of requests: a load is the same alone and beside the other."""

from benchmarks.policy_classes import both, of_seconds


def test_a_load_lasts_as_long_alone_and_beside_the_other():
    """The stretch is calm: its requests are fewer than at the mean rate."""
    interactive, batch = of_seconds("bursty", 40.0, 60.0, 0), of_seconds("heavy_tailed", 10.0, 60.0, 0)
    assert len(interactive.arrivals) < 0.8 * 40 * 60 and 59 < interactive.arrivals[-1].at <= 60
    merged = [arrival.at for arrival in both(interactive, batch).arrivals if arrival.ttft_slo_s is None]
    assert 59 < merged[-1] and merged == [arrival.at for arrival in interactive.arrivals][: len(merged)]
