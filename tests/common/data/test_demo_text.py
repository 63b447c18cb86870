"""The data of ``--demo``: English, the same every time, and a tokenizer for it."""

from pathlib import Path

from transformers import AutoTokenizer, LlamaConfig

from common.data import DataConfig, open_data
from common.data.demo_text import demo_documents, train_demo_tokenizer
from common.data.encode import Encoder
from common.data.examples import Chat
from tests.common.data.conftest import write_records


def test_documents() -> None:
    documents = demo_documents()
    assert 300_000 < sum(map(len, documents)) < 3_000_000
    words = " ".join(documents).lower().split()
    assert words.count("the") / len(words) > 0.03, "not English"


def test_tokenizer(tmp_path: Path) -> None:
    train_demo_tokenizer(2000, tmp_path / "model")
    train_demo_tokenizer(2000, tmp_path / "again")
    LlamaConfig(vocab_size=2000).save_pretrained(tmp_path / "model")  # as it will lie next to a model
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == 2000
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(tmp_path / "again").get_vocab()
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}) == 3
    text = "The fox\u00a0said: “naïve”  \n\n\t日本 🦊."
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text

    documents = demo_documents()[:40]
    assert len(tokenizer(documents[0])["input_ids"]) < len(documents[0]) / 3

    messages = [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": " Yes."},
        {"role": "user", "content": "Really?"},
        {"role": "assistant", "content": "Yes!"},
    ]
    [chat] = Encoder(tokenizer).encode([Chat(messages)])
    assert tokenizer.decode(chat.ids[chat.trained].tolist()) == " Yes.<|end|>Yes!<|end|>"

    file = write_records(tmp_path / "demo.jsonl", [{"text": document} for document in documents])
    batches = open_data(DataConfig((file,), 128, 2), tokenizer, tmp_path)
    assert batches.tokens / (batches.rows * 128) > 0.9
    assert int(batches.batch(0)["input_ids"].max()) < 2000
