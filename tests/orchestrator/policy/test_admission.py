"""Admission by predicted TTFT."""

import pytest

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.decode_choice import Candidate, RequestInfo
from orchestrator.policy.placement import Local, PrefillView, Reject, Remote, predicted_ttft_s
from orchestrator.policy.policies import PlacementDecision, admit
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.types import QueueDepth

PREDICTOR = Predictor(prior_s_per_token=0.001, prior_itl_s=0.0)
WORKER = Candidate("d", 1000, 1000, 16, 0, 0, waiting_tokens=0)


def decide(decision, tokens=1000, queued=0, admission="reject", priority=0):
    request = RequestInfo("r", tokens, 10, 0.0, priority)
    view = PrefillView(1, QueueDepth(1, queued, 0))
    slo = SLOConfig(ttft_s=2.0, admission=admission)
    return admit(decision, request, [WORKER], view, slo, PREDICTOR, late_s=10.0)


def test_request_in_time_is_admitted_by_its_prediction():
    assert decide(Remote("long_prompt")) == PlacementDecision(Remote("long_prompt"))
    assert decide(Local("d", "cost")) == PlacementDecision(Local("d", "cost"))
    view, request = PrefillView(1, QueueDepth(1, 0, 0)), RequestInfo("r", 1000, 10, 0.0)
    for decision in (Remote("long_prompt"), Local("d", "cost")):
        assert predicted_ttft_s(decision, request, [WORKER], view, PREDICTOR) == pytest.approx(1.0)


def test_late_request_is_rejected_with_retry_after():
    rejected = decide(Remote("long_prompt"), queued=6000).decision
    assert isinstance(rejected, Reject) and rejected.reason == "slo_ttft"
    assert rejected.retry_after_s == pytest.approx(5.0)


def test_late_request_is_deferred_or_admitted_as_configured():
    late = Remote("long_prompt")
    assert decide(late, queued=6000, admission="queue") == PlacementDecision(late, later_s=10.0)
    assert decide(late, queued=6000, admission="off") == PlacementDecision(late)


def test_priority_scales_admission_bound():
    assert decide(Remote("x"), queued=6000, priority=-3) == PlacementDecision(Remote("x"))
    assert decide(Remote("x"), queued=500) == PlacementDecision(Remote("x"))
    assert isinstance(decide(Remote("x"), queued=900, priority=2).decision, Reject)


def test_rejection_stays_rejection():
    rejection = Reject("decode_full", 3.0)
    assert decide(rejection).decision is rejection
