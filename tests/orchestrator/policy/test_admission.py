"""Admission by predicted TTFT."""

import pytest

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.admission import Admitted, admit
from orchestrator.policy.decode_choice import Candidate, RequestInfo
from orchestrator.policy.placement import Local, PrefillView, Reject, Remote
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.types import QueueDepth

PREDICTOR = Predictor(prior_s_per_token=0.001, prior_itl_s=0.0)
WORKER = Candidate("d", 1000, 1000, 16, 0, 0, waiting_tokens=0)


def decide(decision, tokens=1000, queued=0, admission="reject", priority=0):
    request = RequestInfo("r", tokens, 10, 0.0, priority)
    view = PrefillView(1, QueueDepth(1, queued, 0))
    return admit(decision, request, [WORKER], view, SLOConfig(ttft_s=2.0, admission=admission), PREDICTOR)


def test_request_in_time_is_admitted_with_its_prediction():
    assert decide(Remote("long_prompt")) == Admitted(Remote("long_prompt"), pytest.approx(1.0))
    assert decide(Local("d", "cost")).predicted_ttft_s == pytest.approx(1.0)


def test_late_request_is_rejected_with_retry_after():
    rejected = decide(Remote("long_prompt"), queued=6000)
    assert isinstance(rejected, Reject) and rejected.reason == "slo_ttft"
    assert rejected.retry_after_s == pytest.approx(5.0)


def test_late_request_is_deferred_or_admitted_as_configured():
    assert decide(Remote("long_prompt"), queued=6000, admission="queue").deferred
    assert not decide(Remote("long_prompt"), queued=6000, admission="off").deferred


def test_priority_scales_admission_bound():
    assert isinstance(decide(Remote("x"), queued=6000, priority=-3), Admitted)
    assert isinstance(decide(Remote("x"), queued=500), Admitted)
    assert isinstance(decide(Remote("x"), queued=900, priority=2), Reject)


def test_rejection_stays_rejection():
    rejection = Reject("decode_full", 3.0)
    assert decide(rejection) is rejection
