"""A body on which one of vLLM's validators trips is its client's fault, and answered with 400.

Some validators look into raw values before these are checked: `{"structured_outputs": 1.5}` has no `get`, and vLLM's
server answers that with 500. Errors that vLLM raises itself are left to vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

# What Python raises for a value of another kind than was expected.
_OF_ANOTHER_KIND = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)

Validated = tuple[Any, list[dict[str, Any]]]


def refuse_what_trips(app: FastAPI) -> None:
    """For all routes that the app has so far."""
    for route in app.router.routes:
        if isinstance(route, APIRoute):
            fields = {
                id(field): field for field in (route.body_field, *route.dependant.body_params) if field is not None
            }
            for field in fields.values():
                vars(field)["validate"] = _refusing(field.validate)


def _refusing(validate: Callable[..., Validated]) -> Callable[..., Validated]:
    def refusing(value: Any, values: dict[str, Any] | None = None, *, loc: tuple[int | str, ...] = ()) -> Validated:
        try:
            return validate(value, values or {}, loc=loc)
        except _OF_ANOTHER_KIND as error:
            said = f"a value of another kind than was expected: {type(error).__name__}: {error}"
            return None, [{"type": "value_error", "loc": loc, "msg": said, "input": None}]

    return refusing
