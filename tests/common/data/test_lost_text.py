"""Text that a tokenizer cannot write is counted, in every kind of record; what it writes in another form is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.data import DataConfig, open_data
from common.data.encode import Encoder, RowFitter
from common.data.examples import classes_of_records, examples_of_records, pairs_of_records
from tests.common.data.conftest import make_tokenizer, numbered

ASCII = [chr(code) for code in range(33, 127)]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt }}"
)


def of_characters(
    unk: str | None, *more: str, normalizer: Any = None, **options: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer as those of Llama 2, with the characters of ASCII and ``more`` tokens."""
    words = ["<s>", "</s>", "<unk>", "▁", *ASCII, *more]
    core = Tokenizer(
        models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[], unk_token=unk, **options)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return finished(core, normalizer, unk)


def of_bytes(normalizer: Any = None, last: int = 256) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes as GPT-2's, up to byte ``last``, which names EOS as its unknown token."""
    tokenizer = make_tokenizer()
    if last < 256:
        marks = "".join(map(chr, range(last)))
        known = "".join(
            text for text, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(marks)
        )
        words = ["<s>", "</s>", *sorted(set(known)), "Ã"]  # the first byte of é
        tokenizer.backend_tokenizer.model = models.BPE(
            vocab={word: at for at, word in enumerate(words)}, merges=[]
        )
    return finished(tokenizer.backend_tokenizer, normalizer, "</s>")


def of_word_pieces() -> PreTrainedTokenizerFast:
    """Return a tokenizer as that of uncased BERT."""
    words = ["<s>", "</s>", "<unk>", *ASCII, *(f"##{letter}" for letter in ASCII)]
    core = Tokenizer(models.WordPiece(vocab={word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return finished(core, normalizers.BertNormalizer(), "<unk>")


def finished(core: Any, normalizer: Any, unk: str | None) -> PreTrainedTokenizerFast:
    core.normalizer = normalizer
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token=unk, chat_template=TEMPLATE
    )


CHARACTERS = "aB é\n\t你▁\xa0\ufffd"
# Tokenizers, and which of these characters have the unknown token, and which no token or a space's.
TOKENIZERS = {
    "bytes": (of_bytes(), "", ""),
    "some bytes": (of_bytes(last=128), "", "é你▁\xa0\ufffd"),
    "bytes, lower case": (of_bytes(normalizers.Lowercase()), "", ""),
    "bytes, compatible forms": (of_bytes(normalizers.NFKC()), "", ""),
    "byte fallback": (
        of_characters("<unk>", *(f"<0x{code:02X}>" for code in range(256)), byte_fallback=True),
        "",
        "▁",
    ),
    "unknown": (of_characters("<unk>"), "é\n\t你\xa0\ufffd", "▁"),
    "left out": (of_characters(None), "", "é\n\t你▁\xa0\ufffd"),
    "one line": (of_characters("<unk>", normalizer=normalizers.Nmt()), "é你\xa0", "\n\t▁\ufffd"),
    "word pieces": (of_word_pieces(), "你▁", "\n\t\ufffd"),
}


def counted(tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]) -> RowFitter:
    """Return the counts of a record and of one with nothing unusual after it."""
    encoder = Encoder(tokenizer, is_alone="chosen" in record)
    read = list(numbered([record, dict.fromkeys(record, "a") if "messages" not in record else {"text": "a"}]))
    if "label" in record:
        for item in classes_of_records(read, {"a": 0}):
            list(encoder.encode_classified(item.examples))
    elif "chosen" in record:
        for item in pairs_of_records(read):
            list(encoder.encode(item.examples))
    else:
        list(encoder.encode(examples_of_records(read)))
    return encoder.fitting


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(drawn=st.text(st.sampled_from(CHARACTERS), max_size=4))
def test_records_with_text_that_is_not_written_are_counted(name: str, drawn: str) -> None:
    tokenizer, unknown, lost = TOKENIZERS[name]
    text = f"a{drawn}a"
    for record in (
        {"text": text},
        {"prompt": text, "completion": "a"},
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]},
        {"prompt": "a", "chosen": "a", "rejected": text},
        {"text": text, "label": "a"},
    ):
        counts = counted(tokenizer, record)
        assert counts.unknown.records == int(any(letter in unknown for letter in drawn)), record
        assert set(counts.characters) == set(drawn) & set(lost), record
        assert counts.unwritten.records == int(bool(counts.characters))


def test_the_name_of_the_unknown_token_in_a_text_is_no_unknown_text() -> None:
    tokenizer, *_ = TOKENIZERS["unknown"]
    assert counted(tokenizer, {"text": "a <unk> a"}).unknown.records == 0
    assert counted(tokenizer, {"text": "a <unk> é"}).unknown.records == 1


def test_control_tokens_in_texts_are_counted_and_named() -> None:
    tokenizer = make_tokenizer("{{ tools | tojson if tools }}" + TEMPLATE)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    for record, names in (
        ({"messages": turns}, []),
        (
            {"messages": [{"role": "user", "content": "What is </s>? <|turn|>"}, turns[1]]},
            ["</s>", "<|turn|>"],
        ),
        (
            {
                "messages": turns,
                "tools": [{"type": "function", "function": {"name": "f", "description": "<s>"}}],
            },
            ["<s>"],
        ),
        ({"text": "a <pad> b"}, ["<pad>"]),
        ({"prompt": "a", "chosen": "</s>", "rejected": "b"}, ["</s>"]),
        ({"text": "a </s", "label": "a"}, []),
        ({"text": "a </s> b", "label": "a"}, ["</s>"]),
    ):
        counts = counted(tokenizer, record)
        assert counts.controls == names and counts.control.records == int(bool(names)), record
    tokenizer = make_tokenizer(TEMPLATE)
    tokenizer.split_special_tokens = True  # such a tokenizer writes them as text
    assert counted(tokenizer, {"text": "a </s> b"}).control.records == 0


def test_the_header_names_control_tokens(jsonl: Callable[..., str], tmp_path: Path) -> None:
    file = jsonl({"text": "plain"}, {"text": "a </s> b"}, {"text": "</s> <|turn|>"})
    for _ in range(2):  # prepared, and opened again
        batches = open_data(DataConfig((file,), 32, 1), make_tokenizer(), tmp_path / "cache")
        [said] = batches.description.split("\n")[1:]
        batches.close()
        assert said.startswith(f"control tokens: 2 records; first {file}, line 2; ") and said.endswith(
            "'</s>', '<|turn|>'"
        )


def test_the_header_says_what_is_not_written(jsonl: Callable[..., str], tmp_path: Path) -> None:
    tokenizer, *_ = TOKENIZERS["one line"]
    file = jsonl({"text": "plain"}, {"text": "é\nb"}, {"text": "c\td\n"})
    for _ in range(2):  # prepared, and opened again
        batches = open_data(DataConfig((file,), 8, 1), tokenizer, tmp_path / "cache")
        [unknown, unwritten] = batches.description.split("\n")[1:]
        batches.close()
        assert unknown.startswith(
            f"unknown: 1 record; first {file}, line 2; the tokenizer has no token for a part"
        )
        assert unwritten.startswith(f"not written: 2 records; first {file}, line 2; the tokenizer leaves out")
        assert unwritten.endswith(r": '\n', '\t'")


def test_of_many_characters_the_first_ones_are_named() -> None:
    tokenizer, *_ = TOKENIZERS["left out"]
    encoder = Encoder(tokenizer)
    records = [{"text": "".join(map(chr, range(start, start + 15)))} for start in (0x4E00, 0x5000)]
    list(encoder.encode(examples_of_records(numbered(records))))
    assert encoder.fitting.changes()[0].endswith("'一', '丁', '丂', '七', '丄', '丅', '丆', '万', ...")
    assert encoder.fitting.unwritten.records == 2
