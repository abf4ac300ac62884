"""A frontend that has no siblings."""

from __future__ import annotations

from unittest.mock import Mock

from orchestrator.frontend.dashboard.siblings import Siblings
from orchestrator.process.telemetry.recent import Recent


def alone(recent: Recent) -> Siblings:
    return Siblings("f", Mock(), "alone", recent)
