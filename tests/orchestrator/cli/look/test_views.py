"""Tables of a fleet, from plain data."""

import pytest

from orchestrator.cli.look.views import set_by


@pytest.mark.parametrize(
    ("age_s", "said"),
    [(0.0, "0 s ago"), (59.0, "59 s ago"), (61.0, "1 min ago"), (7300.0, "2 h ago"), (200_000.0, "2 d ago")],
)
def test_who_set_the_ratio_when_and_why(age_s: float, said: str) -> None:
    desired = {"set_by": "ratio", "set_at": 1000.0, "why": "bears 2.00 instead of 1.00 times what arrives"}
    assert set_by(desired, 1000.0 + age_s) == f"by ratio {said}: {desired['why']}"
    assert set_by({"set_by": "scale", "set_at": 1000.0 + age_s + 5, "why": ""}, 1000.0 + age_s) == "by scale 0 s ago"
