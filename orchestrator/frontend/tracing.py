"""OpenTelemetry spans of requests: one for the HTTP request, and one for each of its stages when it has ended.

vLLM makes the exporter (`otlp_traces_endpoint`, gRPC; HTTP with OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf) and
its own span, `llm_request`. The `traceparent` header that vLLM's server gets makes that span a child of ours.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from orchestrator.config.explain import missing
from orchestrator.config.settings import Config, ConfigError
from orchestrator.process.telemetry.requests import RequestLine, stages

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError:  # they come with the extra `otlp`; `configure` refuses an endpoint without them
    pass
else:
    _propagator = TraceContextTextMapPropagator()

Headers = list[tuple[bytes, bytes]]
_TRACED = ("/v1/", "/inference/")  # paths that compute; not the pages that are polled every second
_NAMES = ("traceparent", "tracestate")


def configure(config: Config) -> dict[str, Any]:
    """Arguments of vLLM's server that make it export spans; none if no endpoint is set. OpenTelemetry's environment
    variables set the sampling. By default the client's decision holds, and all requests without one are sampled.
    Raises ConfigError without OpenTelemetry."""
    if config.frontend.otlp_endpoint is None:
        return {}
    if importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError(missing("frontend.otlp_endpoint", "OpenTelemetry", "otlp"))
    os.environ.setdefault("OTEL_SERVICE_NAME", "pd-orchestrator")
    os.environ.setdefault("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    return {"otlp_traces_endpoint": config.frontend.otlp_endpoint}


class RequestTrace:
    """The span of an HTTP request, with those of its stages as its children."""

    def __init__(self, method: str, path: str, headers: Headers) -> None:
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        self._tracer = trace.get_tracer("pd-orchestrator")
        context = _propagator.extract({name: given[name] for name in _NAMES if name in given})
        self._span = self._tracer.start_span(f"{method} {path}", context=context, kind=SpanKind.SERVER)
        self._context = trace.set_span_in_context(self._span)
        own: dict[str, str] = {}
        _propagator.inject(own, context=self._context)
        kept = [pair for pair in headers if pair[0].decode("latin-1") not in _NAMES]
        self.headers = [*kept, *((name.encode(), value.encode()) for name, value in own.items())]

    def on_request_ended(self, line: RequestLine) -> None:
        """Add spans for the stages of an engine request that has ended."""
        if not self._span.get_span_context().trace_flags.sampled:
            return
        for stage in stages(line):
            attributes = {"pd.request_id": line.id, "pd.worker": stage.worker}
            span = self._span_of(stage.name, self._context, attributes, line, stage.begin_ms, stage.end_ms)
            if stage.name == "prefill" and line.chunks_ms:
                within, begin_ms = trace.set_span_in_context(span), stage.begin_ms
                for end_ms in (*(stage.begin_ms + chunk_ms for chunk_ms in line.chunks_ms), stage.end_ms):
                    self._span_of("prefill chunk", within, attributes, line, begin_ms, min(end_ms, stage.end_ms))
                    begin_ms = min(end_ms, stage.end_ms)
        self._span.set_attributes(
            {
                "pd.request_id": line.id,
                "pd.outcome": line.outcome,
                "pd.decision": line.decision,
                "pd.reason": line.reason,
                "pd.attempts": line.attempts,
                "gen_ai.usage.prompt_tokens": line.prompt_tokens,
                "gen_ai.usage.completion_tokens": line.output_tokens,
            }
        )

    def _span_of(
        self, name: str, context: Context, attributes: dict[str, str], line: RequestLine, begin_ms: float, end_ms: float
    ) -> trace.Span:
        """A span that has ended. `begin_ms` and `end_ms` count from the request's arrival."""
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=_ns(line, begin_ms))
        span.end(_ns(line, end_ms))
        return span

    def end(self) -> None:
        self._span.end()


def begin(method: str, path: str, headers: Headers) -> RequestTrace | None:
    """The trace of a request; None for a path that computes nothing, such as the pages that are polled every second."""
    return RequestTrace(method, path, headers) if path.startswith(_TRACED) else None


def _ns(line: RequestLine, after_ms: float) -> int:
    return int((line.arrived_at + after_ms / 1e3) * 1e9)
