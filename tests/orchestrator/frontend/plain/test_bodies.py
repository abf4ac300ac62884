"""Bodies on which a validator trips, with validators as vLLM's are."""

from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from pydantic import BaseModel, model_validator

from orchestrator.frontend.plain.route import refuse_what_trips

pytestmark = pytest.mark.vllm


class Asked(BaseModel):
    outputs: Any = None
    count: int = 0

    @model_validator(mode="before")
    @classmethod
    def look(cls, values: Any) -> Any:
        if values.get("outputs") is not None:
            values["outputs"].get("json")["schema"][0]
        if values.get("count") == "own":
            raise RuntimeError("the server's own fault")
        return values


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"count": 1}, 200),
        ({"outputs": {"json": {"schema": [1]}}}, 200),
        ({"count": "many"}, 422),
        ({"outputs": 1.5}, 422),
        ({"outputs": {"json": 1}}, 422),
        ({"outputs": {"json": {}}}, 422),
        ({"outputs": {"json": {"schema": []}}}, 422),
        ([], 422),
        (1, 422),
        ({"count": "own"}, 500),
    ],
)
async def test_a_value_that_a_validator_did_not_expect_is_refused(body: Any, status: int) -> None:
    app = FastAPI()

    @app.post("/")
    async def answer(asked: Asked) -> int:
        return asked.count

    refuse_what_trips(app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as asking:
        answered = await asking.post("/", json=body)
    assert answered.status_code == status, answered.text
