"""Which jobs a prefill worker claims."""

from orchestrator.config.settings import SLOClass, SLOConfig
from orchestrator.policy.claims import choose_claims, fair_share_tokens, most_claimed
from orchestrator.types import WindowJob

S_PER_TOKEN = 0.001


def job(name: str, score: float, tokens: int = 1000, waited: float = 0.0, here: int = 0, elsewhere: int = 0):
    return WindowJob(name, score, tokens, waited, here, elsewhere)


def claim(*window, budget=8000, idle=True, affinity=1.0, share=None):
    return choose_claims(window, budget, idle, S_PER_TOKEN, affinity, share)


def test_claims_follow_score_up_to_budget():
    assert claim(job("b", 2.0), job("a", 1.0), job("c", 3.0), budget=2000) == ["a", "b"]


def test_what_a_worker_claims_takes_no_longer_than_a_share_of_the_tightest_objective():
    batch, chat, usual = SLOClass(ttft_s=30.0), SLOClass(ttft_s=2.0), SLOClass(tpot_s=1.0)
    classes = SLOConfig(ttft_s=5.0, classes={"batch": batch, "chat": chat, "usual": usual})
    assert most_claimed(8192, SLOConfig(), 5.0, S_PER_TOKEN) == 3000, "the jobs' own, whatever the fleet's is"
    assert most_claimed(8192, SLOConfig(classes={"batch": batch}), 5.0, S_PER_TOKEN) == 3000
    assert most_claimed(8192, classes, 5.0, S_PER_TOKEN) == 1200, "a class counts, however few have it"
    assert most_claimed(8192, SLOConfig(), 0.01, S_PER_TOKEN) == 1024, "nor less than a part of a batch"
    assert most_claimed(8192, SLOConfig(), 100.0, S_PER_TOKEN) == 2 * 8192, "nor more than two batches"
    assert most_claimed(8192, SLOConfig(), 2.0, 0.0) == 2 * 8192, "prompts that cost nothing"
    assert most_claimed(8192, SLOConfig(), 5.0, S_PER_TOKEN, decodes=True) == 1024, "others are sooner done"


def test_small_job_fills_remaining_budget():
    assert claim(job("a", 1), job("big", 2, tokens=5000), job("c", 3), budget=2500) == ["a", "c"]


def test_a_job_larger_than_the_budget_is_taken_alone_by_an_idle_worker_only():
    assert claim(job("big", 1, tokens=50_000), budget=8000) == ["big"]
    assert claim(job("big", 1, tokens=50_000), budget=8000, idle=False) == []


def test_large_job_is_not_overtaken_for_ever():
    fresh, old = job("big", 1, tokens=5000, waited=4.0), job("big", 1, tokens=5000, waited=6.0)
    assert claim(fresh, job("c", 2), budget=2500, idle=False) == ["c"]
    assert claim(old, job("c", 2), budget=2500, idle=False) == [], "room is kept for it"
    assert claim(job("a", 0), old, job("c", 2), budget=2500, idle=False) == ["a"]
    assert claim(old, job("c", 2), budget=5000, idle=False) == ["big"]
    assert claim(old, job("c", 2), budget=2500) == ["big"]


def test_a_cached_prefix_moves_a_job_forward_and_costs_less_budget():
    assert claim(job("a", 1.0), job("mine", 1.5, tokens=4000, here=3500), budget=1500) == ["mine", "a"]
    assert claim(job("a", 1.0), job("mine", 1.5, tokens=4000, here=3500), budget=1500, affinity=0) == ["a", "mine"]


def test_job_cached_elsewhere_waits_as_long_as_recomputing_it():
    other = job("other", 1.0, tokens=4000, elsewhere=3500)
    for idle in (True, False):
        assert claim(other, job("b", 2.0), idle=idle) == ["b"]
        assert claim(other, idle=idle) == []
        assert claim(job("other", 1.0, tokens=4000, waited=4.0, elsewhere=3500), idle=idle) == ["other"]


def test_idle_workers_share_wave_of_jobs():
    wave = [job(name, place) for place, name in enumerate("abcdefgh")]
    share = fair_share_tokens(8000, 3)
    assert claim(*wave, share=share) == ["a", "b"]
    assert claim(*wave, share=share, budget=1000) == ["a"]
    assert claim(job("big", 0, tokens=6000), *wave[:2], share=share) == ["big"], "nobody would take half of it"
    assert claim(*wave, share=share, idle=False) == []
    assert claim(*wave, job("mine", 9, here=500), share=share, idle=False) == ["mine"]
    assert fair_share_tokens(8000, 0) is None and claim(*wave, share=None, idle=False) == list("abcdefgh")
