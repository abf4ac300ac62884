"""What files of this folder share: a small model, and a second host with a Redis that both reach."""

from collections.abc import Iterator

import pytest
from support_fleet import small_model
from support_redis import Server, running_server
from support_second_host import redis_between, running_second_host


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def second_host() -> Iterator[list[str]]:
    with running_second_host() as command:
        yield command


@pytest.fixture(scope="module")
def redis_url(second_host: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_between(tmp_path_factory.mktemp("redis")) as url:
        yield url
