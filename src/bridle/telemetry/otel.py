"""OpenTelemetry: a trace per session, by the semantic conventions for generative AI.

`invoke_agent` is the session; inside it are its stages, `chat` for each model call and
`execute_tool` for each tool call.
"""

import itertools
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, StatusCode, use_span

from bridle.telemetry.base import TrackedSession, Tracker
from bridle.types import JSON


class Otel(Tracker):
    """Exports over OTLP (HTTP) to `OTEL_EXPORTER_OTLP_ENDPOINT`."""

    def __init__(self, folder: Path, _config: JSON) -> None:
        self._provider = TracerProvider(resource=Resource.create({"bridle.run": folder.name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("bridle")

    def session(self, ended: TrackedSession) -> None:
        """Send a session as OpenTelemetry spans: one for the agent, below it its stages and model
        calls.
        """
        result, stages = ended.result, ended.stages
        attributes = {"conversation.id": result.session_id, "agent.name": result.harness}
        root = self._span("invoke_agent", result.harness, stages[0][1], attributes)
        root.set_attributes({"bridle.task_id": result.task_id, "bridle.status": result.status})
        if result.reward is not None:
            root.set_attribute("bridle.reward", result.reward)
        if result.error is not None:
            root.set_status(StatusCode.ERROR, result.error)
        with use_span(root):
            for (stage, at), (_, end) in itertools.pairwise(stages):
                self._tracer.start_span(stage.lower(), start_time=_ns(at)).end(_ns(end))
            for call in ended.calls():
                self._span("chat", call.model, call.start, call.attributes).end(_ns(call.end))
                for name, until in call.tools:
                    tool = {"tool.name": name}
                    self._span("execute_tool", name, call.end, tool).end(_ns(until))
        root.end(_ns(stages[-1][1]))

    def close(self) -> None:
        """Send pending spans and shut the exporter down."""
        self._provider.shutdown()

    def _span(self, operation: str, name: str, start: float, attributes: JSON) -> Span:
        span = self._tracer.start_span(f"{operation} {name}", start_time=_ns(start))
        given = {"operation.name": operation, **attributes}
        span.set_attributes({f"gen_ai.{key}": value for key, value in given.items()})
        return span


def _ns(at: float) -> int:
    return int(at * 1e9)
