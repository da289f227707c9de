"""Names for the contents of pages: a hash chain over prompt and output tokens.

The key of a page is a BLAKE2b-128 digest of its parent's key and its token ids, each as four bytes,
so it stands for everything before it, too. The chain starts from a digest of the model and the
tenant's salt: another tenant's pages, or another model's, never match.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
PAGE = blake2b(digest_size=DIGEST_BYTES, person=b"evenflow-page")


def root_key(model: str, salt: str) -> bytes:
    """Where the chains of one model and one tenant start."""
    parts = (part.encode() for part in (model, salt))
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return blake2b(framed, digest_size=DIGEST_BYTES, person=b"evenflow-root").digest()


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the page with these ids, whose predecessor has the key ``parent``."""
    page = PAGE.copy()  # cheaper than a new one with the same settings
    page.update(parent + array("I", tokens).tobytes())
    return page.digest()
