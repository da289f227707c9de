"""What one worker must know to move another worker's KV pages."""

from dataclasses import dataclass

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PROTOCOL = 2  # raise it with every change of what goes over a pair


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape both ends must agree on before any byte moves.

    The pool is one tensor ``[page, layer, kv_head, 2, page_size, head_dim]``, so a page is one
    contiguous record of ``page_bytes``.
    """

    model: str  # fingerprint of the weights: pages of another model are refused
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens per page
    dtype: str
    tp_size: int = 1
    protocol: int = PROTOCOL  # of the release: one that speaks another is refused, too

    @property
    def token_bytes(self) -> int:
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return per_token * ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size

    def mismatch(self, other: "KVLayout") -> str | None:
        """The first field in which two ends differ, with both values; None when they agree."""
        for name in self.__dataclass_fields__:
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                return f"{name}: {here!r} here, {there!r} there"
        return None


@dataclass(frozen=True, slots=True)
class KVHandle:
    """A lease on computed pages: the source keeps them until released or expired."""

    request_id: str
    source: str  # address of the holder's control server, "host:port"
    incarnation: str  # of the holder: a restarted worker does not answer for its predecessor
    num_tokens: int  # the KV of the first num_tokens tokens of prompt + output is there
    num_pages: int
    layout: KVLayout

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes
