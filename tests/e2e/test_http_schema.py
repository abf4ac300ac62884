"""Requests made from the server's own schema, sound and unsound, get an answer in time that is no server error."""

from http import HTTPStatus

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.config import (
    CoveragePhaseConfig,
    GenerationConfig,
    PhasesConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
)
from support_fleet import running_fleet

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ANSWER_TIMEOUT_S = 30
EXAMPLES = 3  # of each operation and mode
# Answers are short, so that those to sound requests cost little.
SETS = ("sim.max_model_len=256", "sim.speed=20", "limits.max_n=4")
CONFIG = SchemathesisConfig(
    projects=ProjectsConfig(
        default=ProjectConfig(
            generation=GenerationConfig(modes=list(GenerationMode)),
            phases=PhasesConfig(coverage=CoveragePhaseConfig(enabled=False)),
        )
    )
)


@pytest.fixture(scope="module")
def fleet():
    with running_fleet("sim-2p2d.yaml", *SETS) as running:
        yield running


@pytest.fixture(scope="module")
def schema(fleet):
    return schemathesis.openapi.from_url(f"{fleet.url}/openapi.json", config=CONFIG)


def sent(operation, mode):
    """Send requests to one operation; a failure names the request."""

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case):
        answer = case.call(timeout=ANSWER_TIMEOUT_S)
        if answer.status_code >= 500 and answer.status_code != HTTPStatus.NOT_IMPLEMENTED:
            command = case.as_curl_command()
            raise AssertionError(f"{answer.status_code}: {answer.text[:300]}; of {command[:1500]}")

    send()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_gets_5xx_or_hangs(schema, mode, subtests):
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        with subtests.test(operation.label):
            try:
                sent(operation, mode)
            except Unsatisfiable:
                pass  # it has no input that could be unsound


def test_fleet_serves_after_schema_tests(fleet):
    body = {"model": fleet.model, "prompt": "Hello", "max_tokens": 3}
    assert fleet.http.post("/v1/completions", json=body).status_code == 200
    fleet.assert_no_leaks()
