"""Records longer than a row: what is kept of them, token by token against a plain computation, and what is reported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from common.data import DataConfig, PackedBatches, open_data
from common.data.encode import Encoder, RowFitter
from common.data.examples import class_kind, examples_of_records
from common.data.pack import TokenFile, write_token_file
from common.data.read import DataRecord
from common.data.selection import Counts
from common.errors import UserError
from tests.common.data.conftest import (
    MARKED_TEMPLATE,
    PLAIN_TEMPLATE,
    REWRITING_TEMPLATE,
    make_tokenizer,
    write_records,
)

CONVERSATION = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Thank you!"},
    {"role": "assistant", "content": "The quick brown fox jumps over the lazy dog."},
    {"role": "user", "content": "And the dog?"}, {"role": "assistant", "content": "It is lazy."},
]  # fmt: skip

Document = tuple[list[int], list[bool]]


def fit(tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], fitting: RowFitter) -> list[Document]:
    examples = examples_of_records([DataRecord(record, Path("chats.jsonl"), "line 1")])
    return [
        (part.ids.tolist(), part.trained.tolist()) for part in Encoder(tokenizer, fitting).encode(examples)
    ]


def plainly(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], closing: str
) -> tuple[Document, list[tuple[int, int]]]:
    """The whole conversation, and the tokens of each answer; ``closing`` is what the template trains on behind it."""
    text, answers = "<s>", []
    for message in messages:
        text += f"<|turn|>{message['role']}\n"
        if message["role"] == "assistant":
            answers.append((len(text), len(text + message["content"] + closing)))
        text += message["content"] + "</s>\n"
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = [
        (
            sum(stop <= first for _, stop in out["offset_mapping"]),
            sum(stop <= last for _, stop in out["offset_mapping"]),
        )
        for first, last in answers
    ]
    trained = [
        any(start <= position < stop for start, stop in places) for position in range(len(out["input_ids"]))
    ]
    return (list(out["input_ids"]), trained), places


@pytest.mark.parametrize(("template", "closing"), [(PLAIN_TEMPLATE, "</s>\n"), (MARKED_TEMPLATE, "</s>")])
@pytest.mark.parametrize("messages", [CONVERSATION, CONVERSATION[1:5]])
def test_a_long_conversation_keeps_its_beginning_up_to_an_answer(
    template: str, closing: str, messages: list[dict[str, str]]
) -> None:
    tokenizer = make_tokenizer(template)
    (ids, trained), answers = plainly(tokenizer, messages, closing)
    # The line break behind an answer belongs to its turn, trained on or not
    behind = len(closing) - len("</s>\n")
    ends = [stop - behind for _, stop in answers]
    kept = set()
    for seq_len in range(2, len(ids) + 3):
        fitting = RowFitter(seq_len)
        stop = max((end for end in ends if end <= seq_len), default=seq_len)  # else within the first answer
        documents = fit(tokenizer, {"messages": messages}, fitting)
        if not any(trained[1:stop]):
            assert documents == [] and (fitting.left_out.records, fitting.left_out.tokens) == (1, len(ids))
            assert fitting.left_out.first == "chats.jsonl, line 1" and not fitting.cut.records
            continue
        assert documents == [(ids[:stop], trained[:stop])]
        assert (fitting.cut.records, fitting.cut.tokens) == (int(stop < len(ids)), len(ids) - stop)
        assert not fitting.left_out.records
        kept.add(stop)
    assert kept >= set(ends) and len(kept) > len(ends), "all answers were at the end of a row once"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE, REWRITING_TEMPLATE])
def test_long_records_are_left_out_where_that_is_requested(template: str) -> None:
    tokenizer = make_tokenizer(template)
    whole = fit(tokenizer, {"messages": CONVERSATION}, RowFitter())
    longest, tokens = max(len(ids) for ids, _ in whole), sum(len(ids) for ids, _ in whole)
    for seq_len in (10, longest - 1, longest):
        fitting = RowFitter(seq_len, truncate=False)
        documents = fit(tokenizer, {"messages": CONVERSATION}, fitting)
        assert documents == (whole if seq_len == longest else [])
        assert (fitting.left_out.records, fitting.left_out.tokens) == ((0, 0) if documents else (1, tokens))
        assert fitting.cut.records == 0


def test_of_a_template_that_rewrites_turns_the_documents_that_fit_are_kept() -> None:
    tokenizer = make_tokenizer(REWRITING_TEMPLATE)
    whole = fit(tokenizer, {"messages": CONVERSATION}, RowFitter())
    lengths = [len(ids) for ids, _ in whole]
    assert len(whole) == 3 and lengths == sorted(lengths)
    for seq_len in range(2, lengths[-1] + 1):
        first = [(ids[:seq_len], trained[:seq_len]) for ids, trained in whole[:1] if any(trained[1:seq_len])]
        fitting = RowFitter(seq_len)
        documents = fit(tokenizer, {"messages": CONVERSATION}, fitting)
        assert documents == ([document for document in whole if len(document[0]) <= seq_len] or first)
        lost = sum(lengths) - sum(len(ids) for ids, _ in documents)
        assert (fitting.cut if documents else fitting.left_out).tokens == lost


@pytest.mark.parametrize("bos", [True, False])
def test_a_long_completion_loses_its_end_and_never_its_prompt(bos: bool) -> None:
    tokenizer = make_tokenizer(bos=bos)
    records = [
        {"prompt": "What is the capital of France?", "completion": " The capital of France is Paris."},
        {"instruction": "Say it.", "input": "fox", "output": "The quick brown fox jumps over the lazy dog."},
    ]
    alpaca = (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nSay it.\n\n### Input:\nfox\n\n"
        "### Response:\n"
    )
    for record, prompt, completion in [
        (records[0], records[0]["prompt"], records[0]["completion"]),
        (records[1], alpaca, records[1]["output"]),
    ]:
        lead = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        both = tokenizer(prompt + completion, add_special_tokens=False)["input_ids"]
        assert both[: len(lead)] == lead
        ids = [1] * bos + both + [2]
        trained = [position >= bos + len(lead) for position in range(len(ids))]
        for seq_len in range(bos + len(lead) - 1, len(ids) + 1):
            cut, dropped = RowFitter(seq_len), RowFitter(seq_len, truncate=False)
            expected = [(ids[:seq_len], trained[:seq_len])] if any(trained[:seq_len]) else []
            assert fit(tokenizer, record, cut) == expected
            assert fit(tokenizer, record, dropped) == ([(ids, trained)] if seq_len == len(ids) else [])
            assert (
                cut.cut.records + cut.left_out.records == dropped.left_out.records == int(seq_len < len(ids))
            )


def test_a_completion_of_several_messages_is_cut_between_them() -> None:
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    record = {"prompt": CONVERSATION[:2], "completion": CONVERSATION[2:]}
    [(ids, trained)] = fit(tokenizer, record, RowFitter())
    whole, spans = plainly(tokenizer, CONVERSATION, "</s>\n")
    assert (ids, trained) == whole, "its user's turns carry no loss"
    ends = [stop for _, stop in spans]
    lead = tokenizer.apply_chat_template(CONVERSATION[:2], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    for seq_len in range(len(lead) + 1, len(ids) + 1):
        stop = max((end for end in ends if end <= seq_len), default=seq_len)
        assert fit(tokenizer, record, RowFitter(seq_len)) == [(ids[:stop], trained[:stop])]


def test_plain_texts_continue_in_the_next_row(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    text = "The quick brown fox jumps over the lazy dog. " * 5
    records = [{"text": text}, {"prompt": "", "completion": text}, {"prompt": None, "completion": text}]
    batches = open_data(
        DataConfig((write_records(tmp_path / "a.jsonl", records),), 16, 1), tokenizer, tmp_path / "c"
    )
    assert batches.tokens == 3 * len([*tokenizer(text)["input_ids"], 2])
    assert "cut" not in batches.description and "left out" not in batches.description


def opened(tmp_path: Path, records: list[dict[str, Any]], seq_len: int, **options: Any) -> PackedBatches:
    (tmp_path / "chats.jsonl").unlink(missing_ok=True)
    file = write_records(tmp_path / "chats.jsonl", records)
    config = DataConfig((file,), seq_len, 1, shuffle=False, **options)
    return open_data(config, make_tokenizer(MARKED_TEMPLATE), tmp_path / "cache")


def test_what_is_not_as_written_is_reported_with_the_first_line(tmp_path: Path) -> None:
    """Also when the token file was there already."""
    tokenizer, file = make_tokenizer(MARKED_TEMPLATE), tmp_path / "chats.jsonl"
    (ids, _), answers = plainly(tokenizer, CONVERSATION, "</s>\n")
    seq_len, prompt = len(ids) - 1, "dog " * len(ids)
    lead = [1, *tokenizer(prompt + "fox", add_special_tokens=False)["input_ids"], 2]
    user = tokenizer.apply_chat_template(CONVERSATION[:2], return_dict=True)["input_ids"]
    records: list[dict[str, Any]] = [{"messages": CONVERSATION[:stop]} for stop in (3, 2, 7, 7)]
    records.append({"prompt": prompt, "completion": "fox"})
    file.write_text("".join(f"{json.dumps(record)}\n\n" for record in records))  # every other line is empty
    for _ in range(2):
        batches = open_data(DataConfig((str(file),), seq_len, 1), tokenizer, tmp_path / "cache")
        counts, cut, long, untrained, prompts = batches.description.split("\n")
        lost = 2 * (len(ids) - answers[1][1])
        assert counts.startswith("3 documents from 1 file")
        assert cut.startswith(
            f"cut: 2 records, {lost} tokens; first {file}, line 5; longer than a row of {seq_len}"
        )
        assert long.startswith(
            f"left out: 1 record, {len(lead)} tokens; first {file}, line 9; longer than a row"
        )
        assert untrained.startswith(
            f"left out: 1 record, {len(user)} tokens; first {file}, line 3; no completion"
        )
        rows = [row for step in range(batches.rows) for row in batches.batch(step)["input_ids"].tolist()]
        assert all(row[0] == tokenizer.bos_token_id for row in rows), "a row begins in the middle of a prompt"
        dropping = DataConfig((str(file),), seq_len, 1, truncate=False)
        assert prompts.startswith(
            f"prompts: 1 record; first {file}, line 9; texts, without the chat template"
        )
        counts, long, untrained, _ = open_data(dropping, tokenizer, tmp_path / "cache").description.split(
            "\n"
        )
        assert counts.startswith("1 document from 1 file")
        assert long.startswith(
            f"left out: 3 records, {2 * len(ids) + len(lead)} tokens; first {file}, line 5; longer"
        )
    assert len(list((tmp_path / "cache").iterdir())) == 2, "one file with, one without"


def test_nothing_fits(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no token to train on .*left out: 1 record, \d+ tokens; first .*jsonl, line 1"
    ):
        opened(tmp_path, [{"messages": CONVERSATION}], 12)
    with pytest.raises(
        UserError, match=r"longer than a row of 30 tokens \(truncate=False; truncate=True keeps"
    ):
        opened(tmp_path, [{"messages": CONVERSATION}], 30, truncate=False)


def test_long_names_of_files_fit_into_the_header(tmp_path: Path) -> None:
    header = Counts(
        seq_len=8,
        files=10**9,
        documents=10**15,
        tokens=10**15,
        trainable_tokens=10**15,
        skipped_tokens=10**15,
    )
    for tally in (header.cut, header.left_out, header.untrained):
        tally.add(10**15, "/" + "\U0001f43a" * 1000 + "/chats.jsonl, line 1000000000")
    with write_token_file(tmp_path / "a.tokens", header) as add:
        add(np.arange(8, dtype=np.uint32), 7)
    read = TokenFile(tmp_path / "a.tokens")
    assert read.header == header and read.header.cut.first.endswith("chats.jsonl, line 1000000000")
    assert [part.tolist() for part in read.read(np.array([0]))] == [[list(range(8))], [7]]
    read.close()


def test_of_a_template_that_marks_and_rewrites_turns_the_marks_say_where_to_cut() -> None:
    marking = REWRITING_TEMPLATE.replace(
        "{{ m['content'] }}</s>\n",
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
        "{% else %}{{ m['content'] }}</s>{% endif %}{{ '\\n' }}",
    )
    tokenizer = make_tokenizer(marking)
    [(ids, trained)] = fit(tokenizer, {"messages": CONVERSATION}, RowFitter())
    closed = [
        position + 1
        for position, token in enumerate(ids)
        if token == tokenizer.eos_token_id and trained[position]
    ]
    assert len(closed) == 3 and tokenizer.decode(ids).count("(thinks)") == 1
    for seq_len in range(closed[0], len(ids)):
        stop = max(end for end in closed if end <= seq_len)
        assert fit(tokenizer, {"messages": CONVERSATION}, RowFitter(seq_len)) == [
            (ids[:stop], trained[:stop])
        ]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("template", ["<s> $A </s>", "$A </s>", "<s> $A"])
def test_a_text_of_a_class_is_cut_as_transformers_truncates_it(
    template: str, side: str, tmp_path: Path
) -> None:
    """What the tokenizer puts around a text stays: a head often reads the last token."""
    tokenizer = make_tokenizer()
    special = [
        ("<s>", tokenizer.convert_tokens_to_ids("<s>")),
        ("</s>", tokenizer.convert_tokens_to_ids("</s>")),
    ]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    tokenizer.truncation_side = side
    texts = ["The quick brown fox jumps over the lazy dog. " * 5, "The dog."]
    file = write_records(tmp_path / "texts.jsonl", [{"text": text, "label": 0} for text in texts])
    config = DataConfig((file,), 16, 2, shuffle=False, kind=class_kind({"0": 0}, 0))
    batches = open_data(config, tokenizer, tmp_path / "cache")
    expected = tokenizer(texts, truncation=True, max_length=16)["input_ids"]
    rows = batches.batch(0)["input_ids"].tolist()
    assert [row[: len(ids)] for row, ids in zip(rows, expected, strict=True)] == expected
    assert "what fits of the text is kept" in batches.description and "answers" not in batches.description
