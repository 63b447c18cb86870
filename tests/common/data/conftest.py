"""Small tokenizers made on the spot, and data files."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common.data.read import DataRecord

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.\n",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n",
    "user assistant system What is the capital of France? The capital of France is Paris. Thank you!\n\n",
]

# One turn after the other, each closed by EOS: what most chat templates do.
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MARKED_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ m['content'] }}</s>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# The last turn of the assistant shows reasoning, earlier ones lose it: as Qwen3's template does.
REWRITING_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}(thinks) {% endif %}{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None = None, bos: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>", "<|turn|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    steps = [processors.ByteLevel(trim_offsets=False)]
    if bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]))
    tokenizer.post_processor = processors.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=template,
    )


def numbered(records: Iterable[dict[str, Any]]) -> Iterator[DataRecord]:
    """Return records as those of the lines of a file."""
    for number, record in enumerate(records, 1):
        yield DataRecord(record, Path("data.jsonl"), f"line {number}")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def write_records(path: Path, records: list[dict[str, Any]]) -> str:
    """Write records in the format that the extension names."""
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        case ".json":
            path.write_text(json.dumps(records, indent=2))
        case ".csv" | ".tsv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(
                    file, list(records[0]), delimiter="," if path.suffix == ".csv" else "\t"
                )
                writer.writeheader()
                writer.writerows(records)
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(records), path, row_group_size=3)
    return str(path)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(*records: dict[str, Any], name: str = "data.jsonl") -> str:
        return write_records(tmp_path / name, list(records))

    return write
