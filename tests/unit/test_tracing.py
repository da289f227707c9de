"""A trace says where a request spent its time, as a collector reads it, and none of its text."""

import threading
from collections.abc import Iterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from serving.errors import RequestFailed
from serving.gateway import Gateway
from serving.generation import Generation
from serving.tracing import over_http
from tests.fakes import FakePools, worker
from tests.front import MODEL, TOKENIZER
from workers.core.request import Sampling

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROMPT = tuple(range(31000, 31040))


class Collector:
    """Takes traces over OTLP/HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def __getitem__(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.thread.join(5)


async def ask(pools: FakePools, url: str, n: int = 1, **fields: str) -> None:
    """One call, and its trace sent."""
    tracing = over_http(url)
    gateway = Gateway(pools, TOKENIZER, model=MODEL, tracing=tracing)
    now = gateway.clock()
    generation = Generation("a", "a", (PROMPT,), Sampling(max_tokens=5), now, n=n, **fields)
    try:
        async with aclosing(gateway.generate(generation)) as deltas:
            async for _ in deltas:
                pass
    finally:
        tracing.close()


def attributes(span: Span) -> dict[str, object]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


async def test_parts_of_a_request_lie_within_it_one_behind_the_other(collector: Collector) -> None:
    pools = FakePools(worker("mixed-0"))
    await ask(pools, collector.url, n=2, traceparent=PARENT)
    (root,) = collector["generate"]
    assert root.trace_id.hex() == PARENT.split("-")[1]
    assert root.parent_span_id.hex() == PARENT.split("-")[2]
    told = attributes(root)
    assert told["gen_ai.usage.input_tokens"] == 40 and told["gen_ai.usage.output_tokens"] == 10
    assert told["evenflow.mode"] == "mixed" and told["gen_ai.request.model"] == MODEL
    queues, prefills = collector["queue"], collector["prefill"]
    assert len(queues) == len(prefills) == 2, "one for each answer"
    for queue, prefill in zip(queues, prefills, strict=True):
        assert queue.parent_span_id == prefill.parent_span_id == root.span_id
        assert queue.start_time_unix_nano <= queue.end_time_unix_nano
        assert queue.end_time_unix_nano == prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano <= root.end_time_unix_nano
        assert attributes(prefill)["evenflow.worker"] == "mixed-0"


async def test_a_hand_off_shows_both_workers(collector: Collector) -> None:
    pools = FakePools(
        worker("prefill-0", role="prefill"), worker("decode-0", role="decode"), delay_s=0.09
    )
    await ask(pools, collector.url)
    names = ("prefill", "transfer", "decode")
    (prefill,), (transfer,), (decode,) = (collector[name] for name in names)
    assert attributes(prefill)["evenflow.worker"] == "prefill-0"
    assert attributes(transfer)["evenflow.worker"] == "decode-0"
    assert attributes(decode)["evenflow.worker"] == "decode-0"
    assert prefill.end_time_unix_nano == transfer.start_time_unix_nano
    assert transfer.end_time_unix_nano == decode.start_time_unix_nano


async def test_a_failure_is_a_trace_too(collector: Collector) -> None:
    pools = FakePools(worker("mixed-0"), script=lambda *_: RequestFailed("no"))
    with pytest.raises(RequestFailed):
        await ask(pools, collector.url)
    (root,) = collector["generate"]
    assert root.status.code == root.status.STATUS_CODE_ERROR
    assert "gen_ai.response.finish_reasons" in attributes(root)
    assert not collector["prefill"]


async def test_neither_text_nor_tokens_are_told(collector: Collector) -> None:
    """FAULTS 125."""
    await ask(FakePools(worker("mixed-0")), collector.url)
    everything = b"".join(span.SerializeToString() for span in collector.spans)
    assert not any(str(token).encode() in everything for token in PROMPT)


async def test_a_collector_that_is_away_costs_nobody_an_answer() -> None:
    await ask(FakePools(worker("mixed-0")), "http://127.0.0.1:9")
