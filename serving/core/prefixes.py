"""Whose pages hold the beginning of a prompt, as far as this gateway has sent it there.

Prompts are named by blocks, each name standing for everything up to its end. Of each worker as many
blocks are remembered as its pool holds, the latest used; what others sent there is not known, so
this is a guess that only routing relies on.
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 256  # tokens
Names = tuple[int, ...]


def names_of(prompt: Sequence[int], salt: str) -> Names:
    """The names of a prompt's full blocks. Requests with another salt share nothing."""
    parent, names = hash(salt), []
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        parent = hash((parent, tuple(prompt[end - BLOCK : end])))
        names.append(parent)
    return tuple(names)


class Prefixes:
    """Blocks by worker, and workers by block."""

    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = {}
        self._kept: dict[str, OrderedDict[int, None]] = {}

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
        kept = self._kept.setdefault(worker, OrderedDict())
        for name in names:
            kept[name] = None
            kept.move_to_end(name)
            self._holders.setdefault(name, set()).add(worker)
        while len(kept) > max_tokens // BLOCK:
            self._let_go(kept.popitem(last=False)[0], worker)

    def drop(self, worker: str) -> None:
        """It is gone, and its pages with it."""
        for name in self._kept.pop(worker, ()):
            self._let_go(name, worker)

    def _let_go(self, name: int, worker: str) -> None:
        holders = self._holders[name]
        holders.discard(worker)
        if not holders:
            del self._holders[name]
