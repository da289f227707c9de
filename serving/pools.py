"""The workers as the gateway sees them: who they are, how loaded, and one stream per submission.

It knows nothing about how tokens travel: ``serving.channel`` does, and tests script them.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.core.handle import KVHandle
from workers.core.output import KVLedger, Load, Output
from workers.core.pace import Pace
from workers.core.request import Request

MIXED, PREFILL, DECODE = "mixed", "prefill", "decode"


class WorkerLost(Exception):
    """The worker died, froze, or its channel broke: what ran there has to start again elsewhere."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One attached worker, as last reported."""

    id: str
    role: str  # MIXED, PREFILL or DECODE: what it prefers to do now
    load: Load
    num_pages: int
    page_size: int  # tokens per page
    max_model_len: int
    is_leaving: bool = False  # drained: takes nothing new
    pace: Pace | None = None  # how fast it is; None until it has said so


@dataclass(frozen=True, slots=True)
class Submission:
    """A request together with what has already happened to it."""

    request: Request
    output: tuple[int, ...] = ()  # tokens already delivered to the client
    hand_off: bool = False  # stop after the next token and lease the pages
    handle: KVHandle | None = None  # where the KV of prompt + output is leased
    early: bool = False  # or promised: reserve room and fetch, the next token is still computed


class Pools(Protocol):
    """Every method is called on the gateway's event loop."""

    def workers(self) -> Sequence[WorkerView]:
        """The workers attached now, with their newest load."""
        ...

    def submit(self, worker_id: str, submission: Submission) -> AsyncGenerator[Output, None]:
        """Outputs until the one that is last.

        Raises WorkerLost when the worker is not attached or stops being so. Closing the generator
        early only stops listening: the caller also says ``abort``.
        """
        ...

    def abort(self, worker_id: str, request_id: str) -> None:
        """Fire and forget, idempotent, never raises; also lets go of a lease held under the id."""
        ...

    def reserve(self, worker_id: str, submission: Submission) -> None:
        """An early submission: the same request is submitted there later, with one more token, or
        aborted. As ``abort`` otherwise; the worker may have no room and forget it."""
        ...

    def hand_off(self, worker_id: str, request_id: str) -> None:
        """The request leaves with its pages after its next token there: its last output has a
        handle. As ``abort`` otherwise."""
        ...

    def set_role(self, worker_id: str, role: str) -> None:
        """What it prefers from now on; ends a drain. As ``abort`` otherwise."""
        ...

    def drain(self, worker_id: str) -> None:
        """It takes nothing new. As ``abort`` otherwise."""
        ...

    def on_change(self, listener: Callable[[str], None]) -> None:
        """``listener`` hears the id of a worker whose role has changed or that is leaving, also
        when it is no longer among ``workers``."""
        ...

    async def ledger(self, worker_id: str) -> KVLedger:
        """Who holds each page there; for tests, refused unless debugging is on. WorkerLost when
        nobody answers."""
        ...
