"""A frontend that has no siblings, and what it knows of the queue."""

from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

from orchestrator.fleet.queue_view import QueueView
from orchestrator.frontend.dashboard.siblings import Siblings
from orchestrator.process.telemetry.requests import Recent
from orchestrator.types import QueueDepth


def queue_of(depth: QueueDepth | None) -> QueueView:
    return cast(QueueView, SimpleNamespace(depth=depth))


def alone(recent: Recent) -> Siblings:
    return Siblings("f", Mock(), "alone", recent)
