"""Tables of a fleet, from plain data."""

import io

import pytest
from rich.console import Console

from orchestrator.cli.look.views import fleet_view, in_time_line, model_name, set_by


@pytest.mark.parametrize(
    ("age_s", "said"),
    [(0.0, "0 s ago"), (59.0, "59 s ago"), (61.0, "1 min ago"), (7300.0, "2 h ago"), (200_000.0, "2 d ago")],
)
def test_who_set_the_ratio_when_and_why(age_s: float, said: str) -> None:
    desired = {"set_by": "ratio", "set_at": 1000.0, "why": "bears 2.00 instead of 1.00 times what arrives"}
    assert set_by(desired, 1000.0 + age_s) == f"by ratio {said}: {desired['why']}"
    assert set_by({"set_by": "scale", "set_at": 1000.0 + age_s + 5, "why": ""}, 1000.0 + age_s) == "by scale 0 s ago"


def test_shares_within_objectives_by_class_the_nameless_last():
    shares = {"": 0.98, "batch": 1.0, "chat": 0.9456}
    line = "within objectives in the last minute: batch 100.0%, chat 94.6%, no class 98.0%"
    assert in_time_line(shares) == line
    assert in_time_line({"": 0.98}) == "within objectives in the last minute: 98.0%"
    seen = {"model": "m", "workers": [], "queue": None, "desired": None}
    console = Console(width=100, file=io.StringIO())
    with console.capture() as shown:
        console.print(fleet_view({**seen, "in_time": shares}))
    assert line in shown.get()
    with console.capture() as shown:
        console.print(fleet_view(seen), fleet_view({**seen, "in_time": {}}))
    assert "objectives" not in shown.get()


def test_a_model_is_headed_by_the_name_that_commands_take_and_the_one_of_clients() -> None:
    assert model_name("org/small", "") == "org/small", "the fleet's file names no model"
    assert model_name("small", "small") == "small"
    assert model_name("", "small") == "small", "no frontend answers"
    seen = {"model": "org/small", "workers": [], "queue": None, "desired": None}
    console = Console(width=100, file=io.StringIO())
    with console.capture() as shown:
        console.print(fleet_view(seen, "small"))
    assert "model small, org/small for clients" in shown.get()
