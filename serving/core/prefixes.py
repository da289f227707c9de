"""Whose pages hold the beginning of a prompt, as far as this gateway has sent it there, or heard
that another did.

Prompts are named by blocks, each name standing for everything up to its end. Of each worker as many
blocks are remembered as its pool holds, the latest used. What has become of them there is not
known, so this is a guess that only routing relies on.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

BLOCK, NAME_BYTES = 256, 8  # tokens; of a name
MAX_NEWS = 1024  # blocks that are kept to be told
Names = tuple[int, ...]


def digests(
    prompt: Sequence[int], salt: str, key: bytes, ends: Iterable[int], size: int
) -> Iterator[bytes]:
    """For each end, ascending, what stands for the prompt's tokens before it: ``size`` bytes.
    Requests with another salt share nothing. Whoever does not know the key cannot tell whether a
    digest is that of some text."""
    digest, start = blake2b(salt.encode(), key=key, digest_size=size), 0
    for end in ends:
        digest.update(array("I", prompt[start:end]).tobytes())
        start = end
        yield digest.digest()


def names_of(prompt: Sequence[int], salt: str, key: bytes = b"") -> Names:
    """The names of a prompt's full blocks."""
    ends = range(BLOCK, len(prompt) + 1, BLOCK)
    return tuple(int.from_bytes(d, "little") for d in digests(prompt, salt, key, ends, NAME_BYTES))


class Prefixes:
    """Blocks by worker, and workers by block."""

    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = {}
        self._kept: dict[str, OrderedDict[int, None]] = {}
        self._news: deque[tuple[str, int]] = deque(maxlen=MAX_NEWS)

    def found(self, names: Names) -> dict[str, int]:
        """Tokens of the prompt by worker that has some."""
        found: dict[str, int] = {}
        left = self._holders.get(names[0], set()) if names else set()
        for i, name in enumerate(names):
            left = left & self._holders.get(name, set())
            if not left:
                break
            for worker in left:
                found[worker] = (i + 1) * BLOCK
        return found

    def add(self, names: Names, worker: str, max_tokens: int) -> None:
        """The worker will have computed or fetched this prompt; its pool holds so many tokens."""
        self._news.extend((worker, name) for name in names)
        self.hear(names, worker, max_tokens)

    def hear(self, names: Iterable[int], worker: str, max_tokens: int) -> None:
        """Somebody else says so."""
        kept = self._kept.setdefault(worker, OrderedDict())
        for name in names:
            kept[name] = None
            kept.move_to_end(name)
            self._holders.setdefault(name, set()).add(worker)
        while len(kept) > max_tokens // BLOCK:
            self._let_go(kept.popitem(last=False)[0], worker)

    def news(self) -> dict[str, list[int]]:
        """Blocks by worker that were added since this was asked last."""
        news: dict[str, list[int]] = {}
        for worker, name in self._news:
            news.setdefault(worker, []).append(name)
        self._news.clear()
        return news

    def drop(self, worker: str) -> None:
        """It is gone, and its pages with it."""
        for name in self._kept.pop(worker, ()):
            self._let_go(name, worker)

    def _let_go(self, name: int, worker: str) -> None:
        holders = self._holders[name]
        holders.discard(worker)
        if not holders:
            del self._holders[name]
