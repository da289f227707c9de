"""From token ids to text, one id at a time. Never half a character, never a lost one.

Joined pieces equal the tokenizer's own full decode (special tokens skipped). One exception: where a
run of SentencePiece byte tokens turns invalid after a valid start, the start was already out.
It knows nothing about stop strings: ``serving.choice`` does.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One per sequence."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is still open."""
        ...

    def flush(self) -> str:
        """What a dangling half character decodes to; call once, at the end."""
        ...


class ByteDetokenizer:
    """Byte-level BPE: every token is a run of bytes, so an incremental UTF-8 decoder is exact."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._piece(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class FallbackDetokenizer:
    """SentencePiece with byte fallback: whole words, and <0xE2> tokens for all other characters.

    As in the reference, a run of byte tokens is text when it is valid UTF-8 and one U+FFFD a byte
    otherwise, and one leading space of the whole text is dropped.
    """

    def __init__(self, piece: Callable[[int], str | int], strip_leading_space: bool) -> None:
        self._piece = piece  # text, or the value of a byte token
        self._strip = strip_leading_space
        self._run = bytearray()

    def feed(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if isinstance(piece, str):
            return self._emit(self._broken() + piece) if piece else ""
        self._run.append(piece)
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return ""
        self._run.clear()
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._broken())

    def _broken(self) -> str:
        text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _emit(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """Any other tokenizer: decode a short window with and without the new ids, emit the difference.

    ids     ... | settled window | open ids |
                 start            end        now
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._end = 0

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._open_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._start, self._end = self._end, len(self._ids)
        return text

    def flush(self) -> str:
        return self._open_text() if self._end < len(self._ids) else ""

    def _open_text(self) -> str:
        settled = self._decode(self._ids[self._start : self._end])
        return self._decode(self._ids[self._start :])[len(settled) :]
