"""Names for the contents of pages: a hash chain over prompt and output tokens.

The key of a page is a BLAKE2b-128 digest of its parent's key and its token ids, each as four bytes,
so it stands for everything before it, too. The chain starts from a digest of the model and the
tenant's salt: another tenant's pages, or another model's, never match.
"""

from array import array
from collections.abc import Sequence as Seq
from hashlib import blake2b
from itertools import islice

from workers.core.pages import PagePool
from workers.core.request import Sequence

DIGEST_BYTES = 16
PAGE = blake2b(digest_size=DIGEST_BYTES, person=b"evenflow-page")


def root_key(model: str, salt: str) -> bytes:
    """Where the chains of one model and one tenant start."""
    parts = (part.encode() for part in (model, salt))
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return blake2b(framed, digest_size=DIGEST_BYTES, person=b"evenflow-root").digest()


def next_key(parent: bytes, tokens: Seq[int]) -> bytes:
    """The key of the page with these ids, whose predecessor has the key ``parent``."""
    page = PAGE.copy()  # cheaper than a new one with the same settings
    page.update(parent + array("I", tokens).tobytes())
    return page.digest()


class PrefixCache:
    """Finds pages of a pool by what they hold, and lets others find those of a sequence."""

    def __init__(self, pool: PagePool, model: str, enabled: bool) -> None:
        self._pool, self._model, self._enabled = pool, model, enabled

    def find(self, seq: Sequence) -> list[int]:
        """Pages here that hold the sequence's first tokens already; never its last token, which
        has to be computed for the next one."""
        if not self._enabled or seq.wants_prompt:
            return []
        num_pages = (seq.num_tokens - 1) // self._pool.page_size
        self._name_pages(seq, num_pages)
        return self._pool.find(islice(seq.keys, num_pages))

    def publish(self, seq: Sequence) -> None:
        """Let others find the pages that the sequence has filled."""
        if not self._enabled:
            return
        size, keys = self._pool.page_size, seq.keys
        for i in range(seq.num_published, seq.num_computed // size):
            tokens = seq.tokens(i * size, (i + 1) * size)
            if i == len(keys):
                keys.append(next_key(self._parent(seq), tokens))
            self._pool.publish(seq.pages[i], keys[i], tokens)
            seq.num_published = i + 1

    def _name_pages(self, seq: Sequence, num_pages: int) -> None:
        size, keys = self._pool.page_size, seq.keys
        if len(keys) >= num_pages:
            return
        parent = self._parent(seq)
        for i in range(len(keys), num_pages):
            parent = next_key(parent, seq.tokens(i * size, (i + 1) * size))
            keys.append(parent)

    def _parent(self, seq: Sequence) -> bytes:
        """What the key of the next page is made from."""
        return seq.keys[-1] if seq.keys else root_key(self._model, seq.request.cache_salt)
