"""Numbers of adapters: the same for all who compute them, another one for another adapter."""

from orchestrator.wire.adapters import adapter_number, unique_name


def test_a_number_follows_from_name_path_and_content() -> None:
    cases = [("x", "/a", "1"), ("y", "/a", "1"), ("x", "/b", "1"), ("x", "/a", "2")]
    numbers = [adapter_number(*case) for case in cases]
    assert len(set(numbers)) == 4
    assert numbers[0] == adapter_number("x", "/a", "1") == 1_337_043_938
    assert adapter_number("x/", "a", "1") != adapter_number("x", "/a", "1")


def test_numbers_fit_into_32_bits_and_are_not_those_of_warming_up() -> None:
    numbers = [adapter_number("x", "/a", str(at)) for at in range(10_000)]
    assert 65_536 <= min(numbers) and max(numbers) < 2**31
    assert len(set(numbers)) > 9_990


def test_caches_tell_an_adapter_that_was_loaded_anew() -> None:
    assert unique_name("x", 70_000) != unique_name("x", 70_001)
