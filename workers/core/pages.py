"""Which pages are free, held or kept for their contents. Page tables live on the sequences and the
leases; this owns the rest.

    free ──grow──► held ──last holder lets go──► free           content without a name
                    │ ▲                     └──► kept (LRU)     content named by ``publish``
                    │ └── share ──────────────────┘ │
                    └──── grow evicts the oldest ◄──┘
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import takewhile

from workers.core.request import Sequence


class PagePool:
    """A fixed number of pages. A page is free, kept for its contents (both count as free), or
    held by one or more sequences and leases."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"{num_pages=} and {page_size=} must be at least 1")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._kept: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._by_key: dict[bytes, int] = {}
        self._content: dict[int, tuple[bytes, list[int]]] = {}  # page -> key and its token ids

    @property
    def num_free(self) -> int:
        """Pages that can be had at once."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def max_tokens(self) -> int:
        """The longest context that an empty pool holds."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def fits(self, seq: Sequence, num_tokens: int, shared: Seq[int] = ()) -> bool:
        """Whether the sequence can grow to ``num_tokens``, ``shared`` pages taken first."""
        missing = self.pages_for(num_tokens) - len(seq.pages) - len(shared)
        taken = sum(page in self._kept for page in shared) if shared else 0
        return missing <= self.num_free - taken

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Give the sequence the pages it lacks for its first ``num_tokens`` tokens."""
        free, pages = self._free, seq.pages
        missing = -(-num_tokens // self.page_size) - len(pages)
        assert missing <= self.num_free, f"{missing} pages wanted, {self.num_free} free"
        for _ in range(missing):
            page = free.pop() if free else self._evict()
            self._holders[page] = 1
            pages.append(page)

    def release(self, seq: Sequence) -> None:
        """The last pages go first in line for eviction: a prefix outlives what follows it."""
        self.take_back(reversed(seq.pages))
        seq.pages.clear()

    def take_back(self, pages: Iterable[int]) -> None:
        """One holder of each page lets go."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is freed twice"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._content:
                self._kept[page] = None
            else:
                self._free.append(page)

    # ------------------------------------------------------------------ contents

    def publish(self, page: int, key: bytes, tokens: list[int]) -> None:
        """Name the contents of a full page, so that others can share it. The first page of a
        name stays the one that is found."""
        if key not in self._by_key:
            self._by_key[key] = page
            self._content[page] = (key, tokens)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages with these names, up to the first that is not here."""
        return list(takewhile(lambda page: page >= 0, (self._by_key.get(k, -1) for k in keys)))

    def share(self, seq: Sequence, pages: Seq[int]) -> None:
        """Give an empty-handed sequence the pages found for it, as one more holder of each."""
        assert not seq.pages, f"{seq.id} holds pages already"
        for i, page in enumerate(pages):
            tokens = seq.tokens(i * self.page_size, (i + 1) * self.page_size)
            assert self._content[page][1] == tokens, f"page {page} holds other tokens"
            if not self._holders[page]:
                del self._kept[page]
            self._holders[page] += 1
            seq.pages.append(page)

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        key, _ = self._content.pop(page)
        del self._by_key[key]
        return page
