"""Which pages are free. Page tables live on the sequences and the leases; this owns the rest."""

from collections.abc import Iterable

from workers.core.request import Sequence


class PagePool:
    """A fixed number of pages; each is free or held by exactly one sequence or lease."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"{num_pages=} and {page_size=} must be at least 1")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def max_tokens(self) -> int:
        """The longest context that an empty pool holds."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def fits(self, seq: Sequence, num_tokens: int) -> bool:
        return self.pages_for(num_tokens) - len(seq.pages) <= len(self._free)

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Give the sequence the pages it lacks for its first ``num_tokens`` tokens."""
        missing = self.pages_for(num_tokens) - len(seq.pages)
        assert missing <= len(self._free), f"{missing} pages wanted, {len(self._free)} free"
        for _ in range(missing):
            page = self._free.pop()
            self._is_free[page] = 0
            seq.pages.append(page)

    def release(self, seq: Sequence) -> None:
        self.take_back(reversed(seq.pages))
        seq.pages.clear()

    def take_back(self, pages: Iterable[int]) -> None:
        """Pages that nobody holds any more."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is freed twice"
            self._is_free[page] = 1
            self._free.append(page)
