"""Objectives in a request's headers."""

import pytest

from orchestrator.config.settings import SLOClass
from orchestrator.frontend.edge import Objectives, read_objectives


def test_objectives_are_milliseconds_and_each_may_be_missing():
    assert read_objectives([(b"x-slo-ttft-ms", b"300"), (b"x-slo-tpot-ms", b"12.5")]) == Objectives(0.3, 0.0125)
    assert read_objectives([(b"x-slo-tpot-ms", b"50"), (b"host", b"h")]) == Objectives(None, 0.05)
    assert read_objectives([]) == Objectives()


def test_a_class_gives_what_the_other_headers_leave_open():
    classes = {"batch": SLOClass(ttft_s=30.0), "chat": SLOClass(ttft_s=0.3, tpot_s=0.05)}
    named = read_objectives([(b"x-slo-class", b"chat"), (b"x-slo-ttft-ms", b"200")])
    assert named.resolved(classes) == Objectives(0.2, 0.05, "chat")
    assert read_objectives([(b"x-slo-class", b"batch")]).resolved(classes) == Objectives(30.0, None, "batch")
    assert read_objectives([(b"x-slo-ttft-ms", b"200")]).resolved(classes) == Objectives(0.2)
    with pytest.raises(ValueError, match="^x-slo-class: no class 'bulk'; there are: batch, chat$"):
        read_objectives([(b"x-slo-class", b"bulk")]).resolved(classes)
    with pytest.raises(ValueError, match="slo.classes in the configuration adds them"):
        read_objectives([(b"x-slo-class", b"\xff" * 9000)]).resolved({})


@pytest.mark.parametrize(
    "value", [b"", b"soon", b"0", b"-1", b"nan", b"inf", b"1e9", b"5e-324", b"3ms", b"\xff" * 1000]
)
def test_what_is_no_number_of_milliseconds_is_refused_by_name(value):
    with pytest.raises(ValueError, match="^x-slo-ttft-ms: expected milliseconds from 0.001 to") as refused:
        read_objectives([(b"x-slo-ttft-ms", value)])
    assert len(str(refused.value)) < 200
