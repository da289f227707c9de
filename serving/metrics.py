"""What dashboards read: vLLM's names for what every engine has, evenflow_* for the rest.

Counters and histograms are fed by the gateway, so every latency starts at arrival in the front
door. Gauges are read from the workers' last reports when somebody scrapes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from serving.generation import Trace
from serving.pools import WorkerView

CONTENT_TYPE = CONTENT_TYPE_LATEST
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 10.0),
)
REQUEST_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
)


RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)


class Metrics:
    """One registry per front door. Cheap enough for every token."""

    def __init__(self, model: str, workers: Callable[[], Sequence[WorkerView]]) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(_WorkerGauges(model, workers))
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS
        )
        self._each = _PerToken(model)
        self._registry.register(self._each)
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Waiting on workers.", REQUEST_BUCKETS
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Computing the prompt.", REQUEST_BUCKETS
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First token to last.", REQUEST_BUCKETS
        )
        self._transfer = self._histogram(
            "evenflow_request_transfer_time_seconds", "Moving KV between workers.", TTFT_BUCKETS
        )
        self._ttft_ratio = self._histogram(
            "evenflow_ttft_predicted_ratio", "Predicted / observed, at routing.", RATIO_BUCKETS
        )
        self._itl_ratio = self._histogram(
            "evenflow_itl_predicted_ratio", "Predicted / observed mean gap.", RATIO_BUCKETS
        )
        self._promises = Counter(
            "evenflow_promises",
            "Promises of finished answers by kind and whether they were kept.",
            ["model_name", "promise", "kept"],
            registry=self._registry,
        )
        self._regret = self._labelled(
            "evenflow_route_regret",
            "Promises that the other mode was expected to keep and the chosen one broke.",
            "mode",
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens received.")
        self._finished = self._labelled(
            "vllm:request_success", "Answers that ended as they should.", "finished_reason"
        )
        self._routed = self._labelled("evenflow_requests", "Sequences by mode.", "mode")
        self._fallbacks = self._labelled(
            "evenflow_fallbacks", "Sequences computed again, by cause.", "cause"
        )
        self._scaled = self._labelled(
            "evenflow_scale_decisions", "Periods of the autoscaler by what it decided.", "kind"
        )
        self._failed = self._labelled("evenflow_request_failures", "Calls by error.", "error")
        self._aborted = self._counter(
            "evenflow_requests_aborted", "Calls that their client or an Abort ended."
        )
        # At every scrape: started = completed + aborted + failures + running.
        self._started = self._counter("evenflow_calls_started", "Calls, refused ones included.")
        self._completed = self._counter("evenflow_calls_completed", "Calls answered to the end.")
        self._running = Gauge(
            "evenflow_calls_running", "Calls now.", ["model_name"], registry=self._registry
        ).labels(model)
        self._ignored = self._counter(
            "evenflow_ignored_fields", "Unknown request fields, which are ignored."
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def arrived(self, num_prompt_tokens: int) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)

    def routed(self, mode: str) -> None:
        self._routed.labels(self._model, mode).inc()

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)
        self._each.num_tokens += 1

    def next_token(self, itl_s: float) -> None:
        self._each.gap(itl_s)

    def finished(self, reason: str, e2e_s: float, trace: Trace) -> None:
        """One answer is complete."""
        self._finished.labels(self._model, reason).inc()
        self._e2e.observe(e2e_s)
        self._queue.observe(trace.queue_s)
        self._prefill.observe(trace.prefill_s)
        self._decode.observe(trace.decode_s)
        if trace.mode == "disaggregated":
            self._transfer.observe(trace.transfer_s)

    def judged(self, trace: Trace, regret: float) -> None:
        """What was predicted of a finished answer, against what happened."""
        predicted = trace.predicted
        if trace.ttft_s and predicted and not trace.fallback:
            self._ttft_ratio.observe(predicted["ttft_s"] / trace.ttft_s)
            if trace.itl_s:
                self._itl_ratio.observe(predicted["itl_s"] / trace.itl_s)
        in_time, is_even = trace.ttft_s <= trace.ttft_slo_s, trace.late_gaps == 0
        self._promises.labels(self._model, "ttft", str(in_time).lower()).inc()
        self._promises.labels(self._model, "itl", str(is_even).lower()).inc()
        self._regret.labels(self._model, trace.mode).inc(regret)

    def fell_back(self, cause: str) -> None:
        """``cause``: "transfer" or "worker lost"."""
        self._fallbacks.labels(self._model, cause).inc()

    def started(self) -> None:
        """A call arrived. ``ended`` is told of it once, whatever becomes of it."""
        self._started.inc()
        self._running.inc()

    def ended(self, error: str) -> None:
        """``error``: the kind of it; "" when the call was answered to the end."""
        self._running.dec()
        if not error:
            self._completed.inc()
        elif error == "Aborted":
            self._aborted.inc()
        else:
            self._failed.labels(self._model, error).inc()

    def scale_decided(self, kind: str) -> None:
        """``kind``: "hold", "absorb", "flip", "add" or "remove"."""
        self._scaled.labels(self._model, kind).inc()

    def ignored(self, num_fields: int) -> None:
        self._ignored.inc(num_fields)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(name, text, ["model_name"], registry=self._registry, buckets=buckets)
        return metric.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self._registry).labels(self._model)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, ["model_name", label], registry=self._registry)


class _PerToken(Collector):
    """What is counted with every token, on the one thread that also scrapes: without the library's
    locks and its search through the buckets, which take as long as all else that is done for it."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._gaps = [0] * (len(ITL_BUCKETS) + 1)  # of each bucket by itself
        self._sum_s = 0.0
        self.num_tokens = 0

    def gap(self, gap_s: float) -> None:
        """A token that is not the first, so long after the one before it."""
        self.num_tokens += 1
        self._sum_s += gap_s
        self._gaps[bisect_left(ITL_BUCKETS, gap_s)] += 1

    def collect(self) -> Iterator[HistogramMetricFamily | CounterMetricFamily]:
        bounds = map(floatToGoString, (*ITL_BUCKETS, float("inf")))
        gaps = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between two tokens.", labels=["model_name"]
        )
        buckets = list(zip(bounds, accumulate(self._gaps), strict=True))
        gaps.add_metric([self._model], buckets, self._sum_s)
        yield gaps
        tokens = CounterMetricFamily(
            "vllm:generation_tokens", "Tokens sampled.", labels=["model_name"]
        )
        tokens.add_metric([self._model], self.num_tokens)
        yield tokens


class _WorkerGauges(Collector):
    """The workers' last reports, read at scrape time."""

    def __init__(self, model: str, workers: Callable[[], Sequence[WorkerView]]) -> None:
        self._model = model
        self._workers = workers

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())  # registered before any worker is attached

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        workers = list(self._workers())
        yield from self._totals(workers)
        yield from self._each(workers)

    def _totals(
        self, workers: Sequence[WorkerView]
    ) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        pages = sum(w.load.num_pages for w in workers)
        used = pages - sum(w.load.free_pages for w in workers)
        gauges = {
            "vllm:num_requests_running": sum(w.load.running_seqs for w in workers),
            "vllm:num_requests_waiting": sum(w.load.waiting_seqs for w in workers),
            "vllm:kv_cache_usage_perc": used / pages if pages else 0.0,
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(name, "Over all workers.", labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        cached = sum(w.load.cached_tokens for w in workers)
        counters = {
            "vllm:num_preemptions": sum(w.load.num_preemptions for w in workers),
            "vllm:prefix_cache_queries": cached + sum(w.load.prompt_tokens for w in workers),
            "vllm:prefix_cache_hits": cached,  # both in tokens
        }
        for name, total in counters.items():
            counter = CounterMetricFamily(name, "Over all attached workers.", labels=["model_name"])
            counter.add_metric([self._model], total)
            yield counter

    def _each(self, workers: Sequence[WorkerView]) -> Iterator[GaugeMetricFamily]:
        labels = ["model_name", "worker", "role"]
        for name, field in (
            ("evenflow_worker_running_seqs", "running_seqs"),
            ("evenflow_worker_decode_seqs", "decode_seqs"),
            ("evenflow_worker_waiting_seqs", "waiting_seqs"),
            ("evenflow_worker_queued_tokens", "queued_tokens"),
            ("evenflow_worker_free_pages", "free_pages"),
            ("evenflow_worker_leased_pages", "leased_pages"),
            ("evenflow_worker_pages", "num_pages"),
            ("evenflow_worker_steps", "step"),
            ("evenflow_worker_step_seconds", "step_s"),
            ("evenflow_worker_chunk_tokens", "chunk_tokens"),
            ("evenflow_step_predicted_ratio", "predicted_ratio"),
            ("evenflow_step_prediction_error", "prediction_error"),
        ):
            gauge = GaugeMetricFamily(name, "As last reported.", labels=labels)
            for w in workers:
                gauge.add_metric([self._model, w.id, w.role], getattr(w.load, field))
            yield gauge
