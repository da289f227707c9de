"""What a day of requests looked like, without a word of it: ``evenflow serve --record FILE``.

One JSON line a request, as it ends: when it came, how long prompt and answer were, what it was
promised and got, and names for the prompt's blocks of 64 tokens, so that a replay knows who shares
a prefix with whom. No text and no token ids: a name is a keyed digest of all tokens up to the end
of its block, and the key is drawn for this recording and kept nowhere. ``bench/sim/workload.py``
reads it.
"""

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serving.core.prefixes import digests
from workers.core.request import Request

logger = logging.getLogger(__name__)

BLOCK_SIZE = 64  # tokens
NAME_BYTES = 6
MAX_BLOCKS = 4096  # of one prompt


class Recorder:
    """Appends to a file. ``clock`` is the one that arrivals are told by."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._key = secrets.token_bytes(32)
        self._epoch = time.time() - clock()

    def note(
        self,
        request: Request,
        *,
        output_tokens: int,
        outcome: str,
        first_at: float,  # 0: no token ever came
        last_at: float,
        **seen: Any,
    ) -> None:
        """One request is over. ``seen`` goes to the file as it is. Never raises: a full disk ends
        the recording, not the request."""
        arrived_at, slo = request.arrived_at, request.slo
        line = {
            "at_s": round(self._epoch + arrived_at, 6),
            "prompt_tokens": len(request.prompt),
            "output_tokens": output_tokens,
            "max_tokens": request.sampling.max_tokens,
            "outcome": outcome,
            "ttft_s": round(first_at - arrived_at, 6) if first_at else None,
            "e2e_s": round(last_at - arrived_at, 6) if first_at else None,
            "slo_ttft_s": slo.ttft_s,
            "slo_itl_s": slo.itl_s,
            "priority": request.priority,
            **seen,
            "block_size": BLOCK_SIZE,
            "blocks": self._names(request.prompt, request.cache_salt),
        }
        try:
            self._file.write(json.dumps(line) + "\n")
        except ValueError:
            return  # closed
        except OSError as error:
            logger.error("the recording ends here: %s", error)
            self.close()

    def close(self) -> None:
        self._file.close()

    def _names(self, prompt: Sequence[int], salt: str) -> list[str]:
        """The last, unfilled block has a name as well. Other tenants' prompts share nothing."""
        starts = range(0, min(len(prompt), MAX_BLOCKS * BLOCK_SIZE), BLOCK_SIZE)
        ends = (start + BLOCK_SIZE for start in starts)
        return [d.hex() for d in digests(prompt, salt, self._key, ends, NAME_BYTES)]
