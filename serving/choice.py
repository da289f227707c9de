"""The text side of one answer: tokens in, deltas out; stop strings end it.

It knows nothing about workers. The engine knows nothing about text.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from serving.errors import Internal
from serving.generation import Delta, Generation, PromptLogprob, TokenLogprobs, TokenText
from serving.tokenizer import Tokenizer
from workers.core.output import PromptToken, Token


@dataclass(frozen=True, slots=True)
class Checked:
    """Text that is safe to send, and the stop string that ends it."""

    text: str
    stop: str | None = None


class StopChecker:
    """Finds stop strings whatever the token borders, and holds back what may become one.

    text   ....................|held|
                                the longest end that begins a stop string
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> Checked:
        """The match that ends first wins, then the longest. While not ``armed`` none counts."""
        if not self._stops:
            return Checked(text)
        seen = len(self._held)  # matches that end here were judged before
        text = self._held + text
        if armed and (match := self._first(text, seen)):
            end, stop = match
            self._held = ""
            return Checked(text[: end if self._include else end - len(stop)], stop)
        keep = self._open(text)
        self._held = text[keep:]
        return Checked(text[:keep])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, seen: int) -> tuple[int, str] | None:
        matches = []
        for stop in self._stops:
            at = text.find(stop, max(0, seen - len(stop) + 1))
            if at >= 0:
                matches.append((at + len(stop), -len(stop), stop))
        if not matches:
            return None
        end, _, stop = min(matches)
        return end, stop

    def _open(self, text: str) -> int:
        """Where the longest end of ``text`` starts that could still grow into a stop string."""
        longest = max(len(stop) for stop in self._stops)
        for at in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)


class Choice:
    """Feed it every token of one sequence; after a delta with a finish_reason it is done."""

    def __init__(self, generation: Generation, index: int, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._checker = StopChecker(generation.stop, generation.include_stop)
        sampling = generation.sampling
        self._is_text_only = not generation.stop and (
            sampling.logprobs is None and sampling.prompt_logprobs is None
        )
        self._num_chars = 0  # decoded so far, held ones included; of no use to text alone
        self._sent_chars = 0
        self._ids: list[int] = []  # since the last delta
        self._logprobs: list[TokenLogprobs] = []
        self._prompt: tuple[PromptLogprob, ...] = ()
        self.num_tokens = 0

    def feed(self, token: Token, finish_reason: str | None = None) -> Delta | None:
        """The next delta; None while the text so far may still change. Raises Internal."""
        generation = self._generation
        if not 0 <= token.id < self._tokenizer.vocab_size:
            raise Internal(f"a worker sampled token id {token.id}, outside the vocabulary")
        self.num_tokens += 1
        self._ids.append(token.id)
        if self._is_text_only and finish_reason is None:
            text = self._detokenizer.feed(token.id)
            return self._delta(text) if text else None
        if self.num_tokens == 1 and self._shows(token.prompt):
            self._prompt = self._render_prompt(token.prompt)
        ended = finish_reason == "stop" and token.id in generation.sampling.stop_ids
        if finish_reason and ended and not generation.include_stop:  # not part of the text
            return self._last(Checked(self._rest()), finish_reason, token.id)
        if generation.sampling.logprobs is not None:
            self._logprobs.append(self._render(token))
        text = self._detokenizer.feed(token.id)
        if finish_reason:
            text += self._detokenizer.flush()
        self._num_chars += len(text)
        checked = self._checker.feed(text, self.num_tokens >= generation.sampling.min_tokens)
        if finish_reason and checked.stop is None:
            checked = Checked(checked.text + self._checker.flush())
        if checked.stop is not None:
            return self._last(checked, "stop", None)
        if finish_reason:
            return self._last(checked, finish_reason, token.id)
        return self._delta(checked.text) if checked.text else None

    def end(self, finish_reason: str) -> Delta:
        """The last delta of a sequence that ended without another token."""
        return self._last(Checked(self._rest()), finish_reason, None)

    def _rest(self) -> str:
        """What is still open in the detokenizer and the checker."""
        text = self._detokenizer.flush()
        checked = self._checker.feed(text)
        return checked.text + ("" if checked.stop is not None else self._checker.flush())

    def _last(self, checked: Checked, finish_reason: str, token_id: int | None) -> Delta:
        stop_reason: str | int | None = checked.stop
        if stop_reason is None and token_id in self._generation.stop_token_ids:
            stop_reason = token_id if finish_reason == "stop" else None
        if checked.stop is not None:  # tokens after the cut made no text
            cut = self._sent_chars + len(checked.text)
            self._logprobs = [entry for entry in self._logprobs if entry.offset < cut]
        return self._delta(checked.text, finish_reason, stop_reason)

    def _delta(
        self, text: str, finish_reason: str | None = None, stop_reason: str | int | None = None
    ) -> Delta:
        ids, logprobs, prompt = tuple(self._ids), tuple(self._logprobs), self._prompt
        self._ids, self._logprobs, self._prompt = [], [], ()
        self._sent_chars += len(text)
        return Delta(self._index, text, ids, logprobs, finish_reason, stop_reason, prompt=prompt)

    def _render(self, token: Token) -> TokenLogprobs:
        logprob = token.logprob if token.logprob is not None else 0.0
        top = tuple(self._shown(*pair) for pair in token.top)
        return TokenLogprobs(self._shown(token.id, logprob), top, self._num_chars)

    def _render_prompt(self, tokens: Sequence[PromptToken]) -> tuple[PromptLogprob, ...]:
        first, *others = self._generation.prompts[self._index // self._generation.n]
        rendered = [PromptLogprob(self._shown(first, 0.0), 0, (), 0)]
        decoder, num_chars = codecs.getincrementaldecoder("utf-8")("replace"), 0
        for token_id, token in zip(others, tokens, strict=True):
            num_chars += len(decoder.decode(rendered[-1].token.bytes))
            top = tuple(self._shown(*pair) for pair in token.top)
            shown = self._shown(token_id, token.logprob)
            rendered.append(PromptLogprob(shown, token.rank, top, num_chars))
        return tuple(rendered)

    def _shows(self, tokens: Sequence[PromptToken]) -> bool:
        """Whether they were asked for, and are all there."""
        prompt = self._generation.prompts[self._index // self._generation.n]
        wanted = self._generation.sampling.prompt_logprobs is not None
        return wanted and len(tokens) == len(prompt) - 1

    def _shown(self, token_id: int, logprob: float) -> TokenText:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return TokenText(token_id, text, raw, logprob)
