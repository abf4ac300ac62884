"""`/metrics` of several models: one family for all, whose samples have the label `model_name`.

vLLM expects one model in a process: making its metrics again removes those of the model before, or is refused. See
vllm/v1/metrics/loggers.py, 0.32.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_fastapi_instrumentator import metrics as http_metrics
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from vllm.v1.metrics import loggers
from vllm.v1.metrics.loggers import PrometheusStatLogger

from orchestrator.process.telemetry.metrics import MODEL

_KINDS = ("_gauge_cls", "_counter_cls", "_histogram_cls")
_PARTS = ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls")


class ModelsCollector(Collector):
    """The metrics of one collector for each model, each sample with its model's name."""

    def __init__(self, collectors: Mapping[str, Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for model, collector in self._collectors.items():
            for family in collector.collect():
                kept = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                named = (sample._replace(labels={MODEL: model, **sample.labels}) for sample in family.samples)
                kept.samples.extend(named)
        yield from merged.values()


class OnlyModels(Collector):
    """What a registry has, without other models. Frontends share their files with those before them, whose models may
    have been removed since, or renamed."""

    def __init__(self, registry: CollectorRegistry, names: Iterable[str]) -> None:
        self._registry, self._names = registry, frozenset(names)

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if self._is_shown(sample.labels.get(MODEL))]
            yield family

    def _is_shown(self, model: str | None) -> bool:
        return model is None or model in self._names


@contextlib.contextmanager
def keep_vllm_metrics() -> Iterator[None]:
    """Inside this context vLLM's loggers leave each other's metrics in the registry."""
    original = loggers.unregister_vllm_metrics
    loggers.unregister_vllm_metrics = lambda: None
    try:
        yield
    finally:
        loggers.unregister_vllm_metrics = original


def shared_stat_logger() -> type[PrometheusStatLogger]:
    """vLLM's logger for one of several models: it uses metrics that another model's has made."""
    parts = {name: _sharing(getattr(PrometheusStatLogger, name)) for name in _PARTS}
    return type("SharedStatLogger", (_sharing(PrometheusStatLogger),), parts)


def _sharing(made_of: Any) -> Any:
    kinds = {name: staticmethod(_find_or_make(getattr(made_of, name))) for name in _KINDS if hasattr(made_of, name)}
    return type(made_of.__name__, (made_of,), kinds)


def _find_or_make(kind: Callable[..., Any]) -> Callable[..., Any]:
    def made(name: str, *args: Any, **options: Any) -> Any:
        return REGISTRY._names_to_collectors.get(name) or kind(name, *args, **options)

    return made


def share_http_metrics(apps: Sequence[FastAPI]) -> None:
    """Count the requests of all apps together. Call it before the first request."""
    middlewares = [each for app in apps for each in app.user_middleware if _counts_requests(each)]
    if middlewares:
        registry: Any = middlewares[0].kwargs["registry"]
        common = [http_metrics.default(registry=registry)]
        for each in middlewares:
            each.kwargs["instrumentations"] = common


def _counts_requests(middleware: Any) -> bool:
    return bool(middleware.cls is PrometheusInstrumentatorMiddleware)
