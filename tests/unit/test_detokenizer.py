"""Joined pieces are the full decode, and no piece holds half a character."""

import random
from collections.abc import Sequence

import pytest
import tokenizers

from serving.choice import StopChecker
from serving.detokenizer import REPLACEMENT, Detokenizer, WindowDetokenizer
from serving.tokenizer import Tokenizer
from tests.tokenizers import TEXTS, byte_level, sentencepiece

CLUSTERS = [
    "👨‍👩‍👧‍👦",
    "🇩🇪",
    "👍🏽",
    "❤️‍🔥",
    "ก็",
    "한",
    "لا",
    "你好",
    "é",
    "e\u0301",
    " ",
    "abc",
    "\n",
    "\U0001f9d1\u200d\U0001f680",
]


@pytest.fixture(scope="module")
def bytewise() -> Tokenizer:
    return Tokenizer(byte_level())


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    return Tokenizer(sentencepiece())


def strings(count: int) -> list[str]:
    rng = random.Random(13)
    return TEXTS + ["".join(rng.choices(CLUSTERS, k=rng.randint(1, 12))) for _ in range(count)]


def feed(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("family", ["bytewise", "pieces"])
def test_joined_deltas_equal_the_full_decode(family: str, request: pytest.FixtureRequest) -> None:
    """FAULTS 13."""
    tokenizer: Tokenizer = request.getfixturevalue(family)
    for text in strings(200):
        ids = tokenizer.encode(text)
        deltas = feed(tokenizer.detokenizer(), ids)
        assert "".join(deltas) == tokenizer.decode(ids) == text
        assert REPLACEMENT not in "".join(deltas)


def test_a_window_over_any_decoder_gives_the_same(pieces: Tokenizer) -> None:
    """FAULTS 13, for tokenizers of neither family."""
    for text in strings(100):
        ids = pieces.encode(text)
        deltas = feed(WindowDetokenizer(pieces.decode), ids)
        assert "".join(deltas) == text
        assert REPLACEMENT not in "".join(deltas)


def test_a_dangling_half_character_is_flushed_at_the_end(
    bytewise: Tokenizer, pieces: Tokenizer
) -> None:
    """FAULTS 13: cut inside an emoji, as max_tokens does."""
    for tokenizer in (bytewise, pieces):
        ids = tokenizer.encode("ok 𓀀")[:-1]
        deltas = feed(tokenizer.detokenizer(), ids)
        assert "".join(deltas) == tokenizer.decode(ids)
        assert REPLACEMENT in deltas[-1]
        assert REPLACEMENT not in "".join(deltas[:-1])


def test_random_ids_decode_as_the_library_does(bytewise: Tokenizer) -> None:
    """FAULTS 13: what a random model emits, special tokens included, is mostly not text."""
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(bytewise.vocab_size) for _ in range(rng.randint(1, 40))]
        assert "".join(feed(bytewise.detokenizer(), ids)) == bytewise.decode(ids)


def test_a_token_of_no_text_is_no_error(bytewise: Tokenizer, pieces: Tokenizer) -> None:
    for tokenizer in (bytewise, pieces):
        assert feed(tokenizer.detokenizer(), [0, tokenizer.vocab_size + 5]) == ["", "", ""]


def test_other_tokenizers_are_decoded_through_a_window() -> None:
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert isinstance(Tokenizer(fast).detokenizer(), WindowDetokenizer)
    assert "".join(feed(Tokenizer(fast).detokenizer(), [0, 1, 0])) == "a b a"


def cut_at(text: str, stop: str) -> str:
    at = text.find(stop)
    return text if at < 0 else text[:at]


def test_stop_strings_are_found_across_any_borders() -> None:
    """FAULTS 11."""
    rng = random.Random(11)
    for text in strings(30):
        for _ in range(20):
            start = rng.randrange(len(text))
            stop = text[start : start + rng.randint(1, 12)]
            checker, sent, at = StopChecker([stop]), "", 0
            while at < len(text):
                size = rng.randint(1, 5)
                checked = checker.feed(text[at : at + size])
                at += size
                sent += checked.text
                assert cut_at(text, stop).startswith(sent), "text at or after the cut was sent"
                if checked.stop is not None:
                    break
            assert checked.stop == stop
            assert sent == cut_at(text, stop)


def test_held_back_text_comes_out_when_it_becomes_no_stop() -> None:
    """FAULTS 11."""
    checker = StopChecker(["END", "\n\n"])
    pieces = ["a\n", "b E", "N", "Dx"[1:], "EN"]
    assert [checker.feed(p).text for p in pieces] == ["a", "\nb ", "", "ENx", ""]
    assert checker.flush() == "EN"


def test_which_stop_wins_does_not_depend_on_borders() -> None:
    """FAULTS 11: the one that is complete first."""
    whole = StopChecker(["abcd", "bc"]).feed("xabcd")
    checker = StopChecker(["abcd", "bc"])
    parts = [checker.feed(char) for char in "xabc"]
    assert (whole.text, whole.stop) == ("xa", "bc")
    assert ("".join(p.text for p in parts), parts[-1].stop) == ("xa", "bc")


def test_a_stop_completed_before_min_tokens_does_not_count() -> None:
    checker = StopChecker(["ab", "abc"])
    assert checker.feed("ab", armed=False).stop is None
    assert checker.feed("d").text == "abd"
    assert checker.feed("ab").stop == "ab"


def test_the_stop_string_can_be_kept() -> None:
    checked = StopChecker(["STOP"], include=True).feed("a STOP b")
    assert (checked.text, checked.stop) == ("a STOP", "STOP")
