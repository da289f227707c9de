"""One OpenTelemetry trace for each request, told when it is over: ``evenflow serve --tracing URL``.

The gateway and the workers time a request anyway; its spans are made of those times, so nothing is
carried along and nothing is added to a step. A client's ``traceparent`` becomes the parent. Names
follow OpenTelemetry's conventions for generative AI where there is one. No text, no token ids.

    chat or completion ├── queue ──┤── prefill ──┤── transfer ──┤── decode ──┤
                       arrival                   first token                 last token
"""

import time
from collections.abc import Callable, Iterator

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.config import ConfigError
from serving.running import Call, Seq

Part = tuple[str, float, float, str]  # name, start, end, worker


class Tracing:
    """``clock`` is the one that arrivals are told by. Spans leave on a thread of their own; while
    the collector is away they are dropped, and requests do not notice."""

    def __init__(self, exporter: SpanExporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "evenflow"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("evenflow")
        self._clock, self._epoch = clock, time.time() - clock()

    def note(self, call: Call, model: str) -> None:
        """A call is over."""
        generation = call.generation
        parent = TraceContextTextMapPropagator().extract({"traceparent": generation.traceparent})
        trace = call.seqs[0].trace
        root = self._start("generate", generation.arrived_at, parent)
        root.set_attributes(
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": model,
                "gen_ai.request.max_tokens": generation.sampling.max_tokens,
                "gen_ai.response.finish_reasons": [
                    seq.trace.outcome for seq in call.seqs if seq.trace.outcome != "running"
                ],
                "gen_ai.usage.input_tokens": sum(map(len, generation.prompts)),
                "gen_ai.usage.output_tokens": sum(len(seq.output) for seq in call.seqs),
                "evenflow.request_id": generation.id,
                "evenflow.mode": trace.mode,
                "evenflow.reason": trace.reason,
                "evenflow.cached_tokens": trace.cached_tokens,
                "evenflow.fallback": trace.fallback,
                "evenflow.ttft_s": trace.ttft_s,
            }
        )
        if call.error:
            root.set_status(Status(StatusCode.ERROR, call.error))
        inside = set_span_in_context(root, parent)
        for seq in call.seqs:
            for name, start, end, worker in parts_of(seq):
                span = self._start(name, start, inside)
                span.set_attribute("evenflow.worker", worker)
                span.end(self._ns(end))
        root.end(self._ns(max(seq.last_at for seq in call.seqs) or self._clock()))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _start(self, name: str, at: float, context: Context) -> Span:
        return self._tracer.start_span(name, context, start_time=self._ns(at))

    def _ns(self, at: float) -> int:
        return round((self._epoch + at) * 1e9)


def parts_of(seq: Seq) -> Iterator[Part]:
    """What a sequence spent its time on. One without a token has none to tell."""
    trace, first_at = seq.trace, seq.first_at
    if not first_at:
        return
    began = first_at - trace.ttft_prefill_s
    yield "queue", began - trace.ttft_queue_s, began, trace.prefill_worker
    yield "prefill", began, first_at, trace.prefill_worker
    moved = min(first_at + trace.transfer_s, seq.last_at)
    if trace.transfer_s:
        yield "transfer", first_at, moved, trace.decode_worker
    if seq.last_at > moved:
        yield "decode", moved, seq.last_at, trace.decode_worker


def over_http(url: str) -> Tracing:
    """To a collector that speaks OTLP over HTTP. ConfigError when the exporter is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError("tracing: needs pip install 'evenflow[tracing]'") from None
    return Tracing(OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=5))
