"""A prefill and a decode worker with a real model, in one process on a loopback network."""

import queue
import time
from collections import deque
from collections.abc import Sequence as Seq

from kvtransfer.leases import Leases
from kvtransfer.loopback import LoopbackNetwork, LoopbackTransport
from workers.attention import AttentionBackend, TorchAttention
from workers.core.output import Output, Report, Token
from workers.core.pages import PagePool
from workers.core.policy import Limits
from workers.core.request import Request, Sequence
from workers.core.scheduler import Scheduler
from workers.engine import Engine, Source
from workers.kvcache import KVCache
from workers.models.llama import Llama
from workers.runner import ModelRunner

DTYPE_NAMES = {"torch.float32": "float32", "torch.bfloat16": "bfloat16"}


class Pair:
    """Two workers "p" and "d". Use as a context manager: the pools must be whole at the end."""

    def __init__(
        self,
        model: Llama,
        limits: Limits,
        *,
        page_size: int = 16,
        num_pages: int = 512,
        attention: AttentionBackend | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self.outputs: queue.SimpleQueue[tuple[str, Output]] = queue.SimpleQueue()
        self.num_early = 0
        self.first_tokens: dict[str, Token] = {}  # of each request that ran
        network = LoopbackNetwork()
        layout = model.config.kv_layout(page_size, DTYPE_NAMES[str(model.dtype)])
        self.engines: dict[str, Engine] = {}
        for name in ("p", "d"):
            cache = KVCache(layout, num_pages, model.device)
            leases = Leases(10.0)
            self.engines[name] = Engine(
                ModelRunner(model, cache, attention or TorchAttention()),
                Scheduler(limits, PagePool(num_pages, page_size), prefix_caching=prefix_caching),
                leases,
                LoopbackTransport(network, name, cache.pool, layout, "i0", leases),
                Source(name, "i0", layout),
                emit=lambda report, name=name: self._read(name, report),
            )
            self.engines[name].start()

    def _read(self, name: str, report: Report) -> None:
        for output in report.outputs:
            self.outputs.put((name, output))

    def generate(
        self,
        requests: Seq[Request],
        *,
        disaggregated: bool,
        early: bool = False,
        timeout_s: float = 300.0,
    ) -> dict[str, list[int]]:
        """Run all of them at once; the tokens of each. ``early``: pages move while they are
        computed, and what follows the first token may come before it is heard of."""
        tokens: dict[str, list[int]] = {req.id: [] for req in requests}
        by_id = {req.id: req for req in requests}
        for req in requests:
            engine = self.engines["p" if disaggregated else "d"]
            engine.submit(Sequence(req, hand_off=disaggregated))
        left, deadline = len(requests), time.monotonic() + timeout_s
        ahead: dict[str, list[tuple[str, Output]]] = {req.id: [] for req in requests if early}
        due: deque[tuple[str, Output]] = deque()
        while left:
            told = due.popleft() if due else self.outputs.get(timeout=deadline - time.monotonic())
            name, output = told
            if name == "d" and output.request_id in ahead:
                ahead[output.request_id].append(told)
                continue
            assert output.error is None and output.fallback is None, output
            if output.token is not None:
                tokens[output.request_id].append(output.token.id)
                self.first_tokens.setdefault(output.request_id, output.token)
            if output.promise is not None and early:
                seq = Sequence(by_id[output.request_id], handle=output.promise, is_early=True)
                self.engines["d"].submit(seq)
                self.num_early += 1
            if output.handle is not None:
                req = by_id[output.request_id]
                seq = Sequence(req, output=list(tokens[req.id]), handle=output.handle)
                self.engines["d"].submit(seq)
                due.extend(ahead.pop(req.id, ()))
            left -= output.finish_reason is not None
        return tokens

    @property
    def num_preemptions(self) -> int:
        return sum(engine.load().num_preemptions for engine in self.engines.values())

    @property
    def cached_tokens(self) -> int:
        return sum(engine.load().cached_tokens for engine in self.engines.values())

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            deadline = time.monotonic() + 3
            for name, engine in self.engines.items():
                while not (ledger := engine.ledger()).is_clean:
                    assert time.monotonic() < deadline, (name, ledger)
                    time.sleep(0.01)
        finally:
            for engine in self.engines.values():
                engine.stop()
