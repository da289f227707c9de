"""Workers without an engine: scripted tokens through the real ``Pools`` protocol."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from kvtransfer.core.handle import KVHandle, KVLayout
from serving.pools import Submission, WorkerLost, WorkerView
from workers.core.output import KVLedger, Load, Output, PromptToken, Timing, Token

LAYOUT = KVLayout("fake", 1, 1, 8, 16, "float32")
# What happens at one position of an answer: a token id, a whole output, or an exception.
Event = int | Token | Output | Exception
Script = Callable[[str, Submission, int], Event]


def hashed(vocab_size: int = 256) -> Script:
    """The FAKE model: a hash of prompt, seed and position; never a special token."""

    def script(worker: str, submission: Submission, position: int) -> Event:
        request = submission.request
        key = f"{request.prompt}{request.sampling.seed}{position}".encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big")
        return 3 + number % (vocab_size - 3)

    return script


def scripted(ids: Sequence[int]) -> Script:
    """These tokens in order, then the last one for ever."""
    return lambda worker, submission, position: ids[min(position, len(ids) - 1)]


def worker(id: str, role: str = "", num_pages: int = 1024, **load: int) -> WorkerView:
    return WorkerView(
        id=id,
        role=role or id.split("-")[0],
        load=Load(free_pages=num_pages, num_pages=num_pages, **load),
        num_pages=num_pages,
        page_size=16,
        max_model_len=8192,
    )


class FakePools:
    """Keeps a ledger like a worker's: ``held`` is empty when nothing was forgotten."""

    def __init__(
        self, *views: WorkerView, script: Script | None = None, delay_s: float = 0.0
    ) -> None:
        self.views = {view.id: view for view in views or (worker("mixed-0"),)}
        self.script = script or hashed()
        self.delay_s = delay_s
        self.submissions: list[tuple[str, Submission]] = []
        self.reserved: list[tuple[str, Submission]] = []
        self.aborts: list[tuple[str, str]] = []
        self.held: set[tuple[str, str]] = set()  # (worker, request id): running or leased
        self.leaving: set[tuple[str, str]] = set()  # (worker, request id): told to hand off
        self.num_tokens = 0  # sampled
        self._listeners: list[Callable[[str], None]] = []

    def workers(self) -> list[WorkerView]:
        return list(self.views.values())

    def lose(self, worker_id: str) -> None:
        """The worker dies: what it held is gone with it."""
        self.views.pop(worker_id, None)
        self.held = {(w, id) for w, id in self.held if w != worker_id}

    def set_load(self, worker_id: str, **load: int) -> None:
        view = self.views[worker_id]
        self.views[worker_id] = replace(view, load=replace(view.load, **load))

    def submitted(self, worker_id: str) -> list[Submission]:
        return [submission for w, submission in self.submissions if w == worker_id]

    def abort(self, worker_id: str, request_id: str) -> None:
        self.aborts.append((worker_id, request_id))
        self.held.discard((worker_id, request_id))

    def reserve(self, worker_id: str, submission: Submission) -> None:
        self.reserved.append((worker_id, submission))

    def hand_off(self, worker_id: str, request_id: str) -> None:
        self.leaving.add((worker_id, request_id))

    def set_role(self, worker_id: str, role: str) -> None:
        self._stand(worker_id, role=role, is_leaving=False)

    def drain(self, worker_id: str) -> None:
        self._stand(worker_id, is_leaving=True)

    def _stand(self, worker_id: str, **stance: Any) -> None:
        self.views[worker_id] = replace(self.views[worker_id], **stance)
        for listener in self._listeners:
            listener(worker_id)

    def on_change(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    async def ledger(self, worker_id: str) -> KVLedger:
        owned = {id: 1 for w, id in self.held if w == worker_id}
        return KVLedger(64, 64 - len(owned), 0, owned, {})

    async def submit(self, worker_id: str, submission: Submission) -> AsyncGenerator[Output, None]:
        if worker_id not in self.views:
            raise WorkerLost(f"{worker_id} is not attached")
        self.submissions.append((worker_id, submission))
        request, output = submission.request, list(submission.output)
        held = (worker_id, request.id)
        self.held.add(held)
        if submission.handle is not None:  # fetched: the source lets go
            self.held.discard((submission.handle.source, submission.handle.request_id))
        while True:
            await asyncio.sleep(self.delay_s)
            if held not in self.held:
                if worker_id not in self.views:
                    raise WorkerLost(f"{worker_id} died")
                return  # aborted
            event = self.script(worker_id, submission, len(output))
            if isinstance(event, Exception):
                self.held.discard(held)
                raise event
            answer = self._output(worker_id, submission, output, event)
            if answer.finish_reason is not None:
                self.held.discard(held)
            yield answer
            if answer.is_last:
                return

    def _output(
        self, worker_id: str, submission: Submission, output: list[int], event: int | Token | Output
    ) -> Output:
        if isinstance(event, Output):
            return replace(event, request_id=submission.request.id)
        token = event if isinstance(event, Token) else self._token(submission, event)
        is_first = len(output) == len(submission.output)
        output.append(token.id)
        self.num_tokens += 1
        sampling = submission.request.sampling
        reason = "length" if len(output) >= sampling.max_tokens else None
        if token.id in sampling.stop_ids and len(output) >= sampling.min_tokens:
            reason = "stop"
        handle = None
        key = (worker_id, submission.request.id)
        if (submission.hand_off or key in self.leaving) and reason is None:
            self.leaving.discard(key)
            length = len(submission.request.prompt) + len(output) - 1
            handle = KVHandle(submission.request.id, worker_id, "1", length, 1, LAYOUT)
        timing = self._timing(submission) if is_first or reason or handle else None
        return Output(submission.request.id, token, reason, handle, timing=timing)

    def _token(self, submission: Submission, id: int) -> Token:
        sampling, prompt = submission.request.sampling, submission.request.prompt
        shown: tuple[PromptToken, ...] = ()
        if sampling.prompt_logprobs is not None and not submission.output:
            top = tuple((3 + i, -0.25 - i) for i in range(sampling.prompt_logprobs))
            shown = tuple(PromptToken(-1.5 - i, 7, top) for i in range(len(prompt) - 1))
        k = sampling.logprobs
        if k is None:
            return Token(id, prompt=shown)
        return Token(id, -0.5, tuple((id + i, -0.5 - i) for i in range(k)), shown)

    def _timing(self, submission: Submission) -> Timing:
        if submission.handle is not None:
            return Timing(queue_s=0.125, transfer_s=0.25)
        return Timing(queue_s=0.5, prefill_s=1.0)
