"""Which layers of a last chunk go out before the step has ended, and the link's rate that this depends on."""

import pytest

from connectors.push.blocks.chunks import LinkRate, StepLayers, group_sizes

GB = 1_000_000_000
FORWARD = object()  # a forward pass


@pytest.mark.parametrize(
    ("layers", "milliseconds", "sizes"),
    [
        (32, 0.0, [32]),
        (32, 0.9, [32]),  # a half is not worth a post
        (32, 1.0, [16, 16]),
        (32, 2.0, [16, 8, 8]),
        (32, 4.0, [8, 8, 8, 4, 4]),
        (32, 40.0, [4] * 7 + [2, 1, 1]),
        (30, 40.0, [4] * 7 + [1, 1]),
        (8, 40.0, [1] * 8),
        (2, 0.5, [2]),
        (2, 5.0, [1, 1]),
        (1, 100.0, [1]),
    ],
)
def test_short_chunks_go_at_once_and_long_ones_in_groups(layers: int, milliseconds: float, sizes: list[int]) -> None:
    assert group_sizes(layers, round(milliseconds * 10 * GB / 1000), 10 * GB) == sizes


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 28, 61, 80, 126])
def test_groups_have_each_layer_once_and_are_few_and_end_small(layers: int) -> None:
    for size_bytes in (1, 10**5, 10**6, 10**7, 10**8, 10**9, 10**10):
        sizes = group_sizes(layers, size_bytes, 10 * GB)
        assert sum(sizes) == layers and min(sizes) > 0
        assert len(sizes) <= 8 + 8
        last_s, layer_s = sizes[-1] * size_bytes / layers / (10 * GB), size_bytes / layers / (10 * GB)
        assert last_s <= max(0.001, 2 * layer_s)


def test_link_rate_follows_large_writes_and_ignores_small_ones() -> None:
    link = LinkRate()
    assert link.bytes_per_s == 10 * GB
    link.observe(1000, 0.005)  # it took that long to see that it had ended
    assert link.bytes_per_s == 10 * GB
    for _ in range(60):
        link.observe(100 * 10**6, 0.1)
    assert link.bytes_per_s == pytest.approx(GB, rel=0.01)
    for _ in range(60):
        link.observe(100 * 10**6, 0.005)
    assert link.bytes_per_s == pytest.approx(20 * GB, rel=0.01)
    link.observe(100 * 10**6, 0.0)
    assert link.bytes_per_s == pytest.approx(20 * GB, rel=0.01)


class ByTwo(StepLayers):
    def _sizes(self, regions: int, blocks: int) -> list[int]:
        return [2] * (regions // 2)


def test_each_prompt_has_groups_of_its_own() -> None:
    step = StepLayers()
    step.know("abcd", "abcd", block_bytes=400_000)
    sent = [step.report(name, {"long": 500, "short": 5}, FORWARD) for name in "abcd"]
    assert sent == [{"long": (0,)}, {"long": (1,)}, {"long": (2,)}, {"long": (3,), "short": (0, 1, 2, 3)}]
    assert step.rest("long") == step.rest("short") == ()
    assert step.rest("computed in another step") is None


def test_what_has_not_gone_out_is_the_rest() -> None:
    step = ByTwo()
    step.know("abcd", "abcd", 1)
    assert [step.report(name, {"s": 1}, FORWARD) for name in "acb"] == [{}, {"s": (0, 2)}, {}]
    assert step.rest("s") == (1, 3)
    step.end()
    assert step.rest("s") is None
    assert step.report("a", {"s": 1}, FORWARD) == {}


def test_a_layer_of_two_regions_goes_out_with_both_and_once() -> None:
    step = StepLayers(one_by_one=True)
    step.know("aabb", "ab", 1)
    assert [step.report("a", {"s": 1}, FORWARD) for _ in range(2)] == [{"s": (0, 1)}, {}]
    assert step.rest("s") == (2, 3)


def test_layers_that_share_a_region_do_not_go_out_before_the_end() -> None:
    step = StepLayers(one_by_one=True)
    step.know("ab", "abc", 1)
    assert step.report("a", {"s": 1}, FORWARD) == {} and step.rest("s") is None


def test_passes_of_a_drafter_send_nothing_early() -> None:
    """Each writes its layers again, the last one after the model has sampled."""
    step = StepLayers(one_by_one=True)
    step.know(["a", "b", "drafter"], ["a", "b", "drafter"], 1)
    for _ in range(2):
        assert [step.report(name, {"s": 1}, FORWARD) for name in "ab"] == [{"s": (0,)}, {"s": (1,)}]
        assert [step.report("drafter", {"s": 1}, object()) for _ in range(2)] == [{}, {}]
        assert step.rest("s") == (2,)
        step.end()
    # The model's pass is a replayed graph, in which no layer reports.
    assert step.report("drafter", {"s": 1}, object()) == {} and step.rest("s") is None
