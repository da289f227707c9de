"""FAKE with pages: a model whose next token is a hash of what it reads through its page table.

A page that was freed too early, filled too late or taken for another one gives other tokens.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from workers.core.output import Token
from workers.core.plan import Chunk

VOCAB = 94  # the ASCII characters that can be seen: every token is one


def next_token(context: bytes) -> int:
    """The token after these ids, four bytes each."""
    return int.from_bytes(blake2b(context, digest_size=8).digest(), "little") % VOCAB


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What an undisturbed run says."""
    context, output = array("I", prompt), []
    for _ in range(num_tokens):
        output.append(next_token(context.tobytes()))
        context.append(output[-1])
    return output


class PagedModel:
    """An executor. ``pages`` is the pool: the "KV" of a token is its id."""

    vocab_size = VOCAB
    fails = False  # whether the next steps raise

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = [array("I", [0] * page_size) for _ in range(num_pages)]

    def run(self, chunks: tuple[Chunk, ...]) -> dict[str, Token]:
        if self.fails:
            raise RuntimeError("failed on purpose")
        for seq, start, length in chunks:
            for position, token in enumerate(seq.tokens(start, start + length), start):
                page, offset = divmod(position, self.page_size)
                self.pages[seq.pages[page]][offset] = token
        return {
            seq.id: Token(next_token(self._read(seq.pages, start + length)))
            for seq, start, length in chunks
            if start + length == seq.num_tokens
        }

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""

    def _read(self, pages: Sequence[int], num_tokens: int) -> bytes:
        used = pages[: -(-num_tokens // self.page_size)]
        return b"".join(self.pages[page].tobytes() for page in used)[: 4 * num_tokens]
