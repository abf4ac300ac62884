"""Tables of a fleet, from plain data."""

import datetime
import io

from rich.console import Console

from orchestrator.cli.look.views import fleet_view, in_time_line, model_name, set_by


def test_who_set_the_ratio_when_and_why() -> None:
    """When by the clock that wrote it, whatever that of this host says."""
    desired = {"set_by": "ratio", "set_at": 1e9, "why": "bears 2.00 instead of 1.00 times what arrives"}
    at = datetime.datetime.fromtimestamp(1e9).isoformat(" ")
    assert set_by(desired) == f"by ratio at {at}: {desired['why']}" and set_by({**desired, "why": ""}).endswith(at)


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
