"""How many prompt tokens a step computes beside sequences that decode."""

import pytest

from orchestrator.policy.choices.steps import STEP_MARGIN, StepTimes, prompt_tokens_beside, share_of

TPOT_S = 0.1


@pytest.mark.parametrize("beside_s", [0.0, 0.01, 0.04])
def test_a_step_lasts_no_longer_than_the_objective(beside_s):
    tokens = prompt_tokens_beside(TPOT_S, beside_s, 1e-4)
    assert beside_s + tokens * 1e-4 <= STEP_MARGIN * TPOT_S < beside_s + (tokens + 1) * 1e-4


@pytest.mark.parametrize(
    ("tokens", "prompts", "share"),
    [(100, [], 100), (100, [30, 70], 100), (100, [500, 7, 400], 46), (100, [500, 400, 300], 33), (2, [9, 9, 9], 0)],
)
def test_prompts_share_a_step_and_short_ones_leave_the_rest_to_others(tokens, prompts, share):
    assert share_of(tokens, prompts) == share
    assert tokens - len(prompts) < sum(min(share, prompt) for prompt in prompts) <= tokens or not prompts


@pytest.mark.parametrize("beside_s", [0.06, 0.09, 0.2])
def test_a_prompt_takes_at_most_twice_as_long_as_by_itself(beside_s):
    """However long the steps of those that decode are by themselves."""
    tokens = prompt_tokens_beside(TPOT_S, beside_s, 1e-4)
    assert (beside_s + tokens * 1e-4) / tokens == pytest.approx(2 * 1e-4, rel=0.01)


def test_each_step_computes_something():
    assert prompt_tokens_beside(TPOT_S, 0.01, 5.0) == 1
    assert prompt_tokens_beside(TPOT_S, 0.01, 0.0) > 1_000_000, "prompts that cost nothing"


def decoding() -> StepTimes:
    """Of an engine that has only decoded, in steps of 20 ms."""
    times = StepTimes(TPOT_S)
    for _ in range(50):
        times.ended(0, 8, 0.02)
    return times


def beside(s_per_token: float, rel: float) -> object:
    return pytest.approx(prompt_tokens_beside(TPOT_S, 0.02, s_per_token), rel=rel)


def test_step_times_follow_the_engine():
    times = StepTimes(TPOT_S)
    assert times.prompt_tokens() is None, "nothing is known"
    for _ in range(50):
        times.ended(0, 8, 0.02)
    assert times.prompt_tokens() is None, "of prompts"
    for tokens in (16, 2048, 500):  # a short prompt, whose step takes the fixed time, tells little
        times.ended(tokens, 8, 0.025 + tokens * 1e-4)
    assert times.prompt_tokens() == beside(1e-4, rel=0.1)
    for _ in range(60):  # contexts grow
        times.ended(300, 8, 0.02 + 300 * 3e-4)
    assert times.prompt_tokens() == beside(3e-4, rel=0.02)


def test_steps_with_hardly_a_prompt_token_tell_little():
    """The first token after KV has come is one prompt token, in a step that takes as long as others, more or less."""
    times = decoding()
    times.ended(2048, 8, 0.02 + 2048 * 1e-4)
    for noise_s in [0.002, -0.002] * 100:
        times.ended(1, 8, 0.02 + noise_s)
    assert times.prompt_tokens() == beside(1e-4, rel=0.15)


def test_steps_of_prompts_alone_tell_what_a_token_takes():
    times = StepTimes(TPOT_S)
    for _ in range(20):
        times.ended(0, 8, 0.02)
        times.ended(1000, 0, 0.12)
    assert times.prompt_tokens() == beside(1e-4, rel=0.02)


@pytest.mark.parametrize("prompt_tokens", [1, 4, 20])
def test_short_prompts_alone_in_slow_steps_tell_little(prompt_tokens):
    """As on a decode worker with little to do: KV comes, or a short prompt, where nothing decodes."""
    times = StepTimes(TPOT_S)
    times.ended(8192, 0, 8192 * 1e-4)
    for _ in range(4000):
        times.ended(prompt_tokens, 0, 0.021)
        times.ended(0, 1, 0.02)
    assert times.prompt_tokens() == beside(1e-4, rel=0.25)


def test_a_first_prompt_that_waited_for_a_compiler_holds_up_no_others():
    """A short one, for three seconds: each step with a single token of a prompt would say little against it."""
    times = decoding()
    times.ended(30, 8, 3.0)
    assert times.prompt_tokens() == 1
    for _ in range(30):
        tokens = times.prompt_tokens()
        times.ended(tokens, 8, 0.02 + tokens * 1e-4)
    assert times.prompt_tokens() == beside(1e-4, rel=0.1)


def test_without_an_objective_a_step_computes_what_fits():
    times = StepTimes(0.0)
    times.ended(1000, 8, 0.1)
    assert times.prompt_tokens() is None
