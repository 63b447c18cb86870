"""Which tokens carry loss, for every record shape: read back by decoding just those."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from common.data.encoding import Encoder
from common.data.files import Record
from common.data.shapes import SEGMENT_CHARACTERS, Chat, Example, Plain, examples_of_records, examples_of_text_file
from common.errors import UserError
from tests.common.data.conftest import MARKED_TEMPLATE, PLAIN_TEMPLATE, REWRITING_TEMPLATE, make_tokenizer

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "Thank you!"},
    {"role": "assistant", "content": "The quick brown fox."},
]


def encode(tokenizer: PreTrainedTokenizerFast, *examples: Example) -> list[tuple[str, str]]:
    """Whole text and trained text of every document."""
    documents, ids, trained = [], [], []
    for encoded in Encoder(tokenizer).encode(examples):
        assert len(encoded.ids) == len(encoded.trained)
        ids += encoded.ids.tolist()
        trained += [token for token, bit in zip(encoded.ids.tolist(), encoded.trained.tolist(), strict=True) if bit]
        if encoded.ends:
            documents.append((tokenizer.decode(ids), tokenizer.decode(trained)))
            ids, trained = [], []
    assert not ids
    return documents


def encode_records(tokenizer: PreTrainedTokenizerFast, *records: dict[str, Any]) -> list[tuple[str, str]]:
    return encode(tokenizer, *examples_of_records(numbered(records), "data.jsonl"))


def numbered(records: Iterable[dict[str, Any]]) -> Iterator[Record]:
    for number, record in enumerate(records, 1):
        yield Record(record, f"line {number}")


@pytest.mark.parametrize("bos", [True, False])
def test_text(bos: bool) -> None:
    tokenizer = make_tokenizer(bos=bos)
    start = "<s>" if bos else ""
    whole = f"{start}The fox.</s>"
    assert encode_records(tokenizer, {"text": "The fox."}, {"text": " "}, {"text": None}) == [(whole, whole)]
    ids = next(Encoder(tokenizer).encode([Plain("", "The fox.")])).ids.tolist()
    assert ids == [*tokenizer("The fox.")["input_ids"], tokenizer.eos_token_id]


def test_eos_is_not_doubled(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode_records(tokenizer, {"text": "The fox.</s>"}) == [("<s>The fox.</s>", "<s>The fox.</s>")]
    # Two line breaks are one token here, and still only white space.
    assert encode_records(tokenizer, {"text": "A</s>\n"}) == [("<s>A</s>\n", "<s>A</s>\n")]
    assert encode_records(tokenizer, {"text": "A</s> b"}) == [("<s>A</s> b</s>", "<s>A</s> b</s>")]


def test_no_eos() -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    assert encode_records(tokenizer, {"text": "A"}) == [("<s>A", "<s>A")]


def test_long_text_is_tokenized_in_segments(tokenizer: PreTrainedTokenizerFast) -> None:
    line = "The quick brown fox jumps over the lazy dog.\n"
    text = line * (9 * SEGMENT_CHARACTERS // (8 * len(line)))
    whole = [1, *tokenizer(text, add_special_tokens=False)["input_ids"], 2]
    for examples in (
        list(examples_of_records(numbered([{"text": text}]), "f")),
        list(examples_of_text_file(numbered({"text": part} for part in text.splitlines(keepends=True)))),
    ):
        assert len(examples) == 2
        parts = list(Encoder(tokenizer).encode(examples))
        assert [part.ends for part in parts] == [False, True]
        assert [token for part in parts for token in part.ids.tolist()] == whole
    assert "".join(e.completion for e in examples_of_records(numbered([{"text": "x" * len(text)}]), "f")) == "x" * len(
        text
    )  # type: ignore[union-attr]


def test_prompt_completion(tokenizer: PreTrainedTokenizerFast) -> None:
    records = [
        {"prompt": "What is", "completion": " Paris.", "text": "ignored"},
        {"prompt": "", "completion": "The fox"},
        {"prompt": "nothing follows", "completion": ""},
        {"prompt": None, "completion": "dog"},
    ]
    assert encode_records(tokenizer, *records) == [
        ("<s>What is Paris.</s>", " Paris.</s>"),
        ("<s>The fox</s>", "<s>The fox</s>"),
        ("<s>dog</s>", "<s>dog</s>"),
    ]


def test_token_across_the_border_is_trained(tokenizer: PreTrainedTokenizerFast) -> None:
    """The ids are those of the whole text, even where prompt and completion meet within a token."""
    text = "Write a response that appropriately completes the request."
    within = 0
    for at in range(1, len(text)):
        [encoded] = Encoder(tokenizer).encode([Plain(text[:at], text[at:])])
        assert encoded.ids.tolist() == [*tokenizer(text)["input_ids"], 2]
        trained = tokenizer.decode(encoded.ids[encoded.trained].tolist())
        assert f"{text}</s>".endswith(trained)
        assert len(trained) >= len(text) - at + len("</s>")
        within += len(trained) > len(text) - at + len("</s>")
    assert within > 5


def test_alpaca(tokenizer: PreTrainedTokenizerFast) -> None:
    [first, second, third] = encode_records(
        tokenizer,
        {"instruction": "Say {it}.", "input": "", "output": "The fox", "text": "ignored"},
        {"instruction": "Say it.", "input": "fox", "output": "The fox"},
        {"instruction": "Say it.", "output": "The fox"},
    )
    assert first == (
        "<s>Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nSay {it}.\n\n### Response:\nThe fox</s>",
        "The fox</s>",
    )
    assert second == (
        "<s>Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request."
        "\n\n### Instruction:\nSay it.\n\n### Input:\nfox\n\n### Response:\nThe fox</s>",
        "The fox</s>",
    )
    assert third[0] == first[0].replace("{it}", "it")


def test_shapes_may_be_mixed_in_a_file(tokenizer: PreTrainedTokenizerFast) -> None:
    """Read as a table, every record has all columns; those without values do not count."""
    records = [
        {"messages": None, "prompt": None, "completion": None, "text": "A"},
        {"messages": None, "prompt": "B", "completion": "C", "text": "ignored"},
        {"messages": None, "prompt": "B", "completion": None, "text": None},
        {"text": "D"},
    ]
    assert [trained for _, trained in encode_records(tokenizer, *records)] == ["<s>A</s>", "C</s>", "<s>D</s>"]


def rendered(messages: list[dict[str, str]]) -> str:
    return "<s>" + "".join(f"<|turn|>{m['role']}\n{m['content']}</s>\n" for m in messages)


def test_messages_without_marks() -> None:
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    [(whole, trained)] = encode_records(tokenizer, {"messages": CONVERSATION, "id": "1"})
    assert whole == rendered(CONVERSATION)
    assert trained == "Paris.</s>\nThe quick brown fox.</s>\n"


def test_messages_with_marks() -> None:
    tokenizer = make_tokenizer(MARKED_TEMPLATE)
    [(whole, trained)] = encode_records(tokenizer, {"messages": CONVERSATION})
    assert whole == rendered(CONVERSATION)
    assert trained == "Paris.</s>The quick brown fox.</s>"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_messages_that_end_with_the_user(template: str) -> None:
    tokenizer = make_tokenizer(template.replace("</s>", "<|turn|>"))
    [(whole, trained)] = encode_records(tokenizer, {"messages": CONVERSATION[:4]})
    assert whole.endswith("Thank you!<|turn|>\n</s>")
    assert trained.rstrip() == "Paris.<|turn|>", "the user's words, or an EOS that the assistant did not say"
    [(_, trained)] = encode_records(tokenizer, {"messages": CONVERSATION})
    assert trained.endswith("</s>")


def test_template_that_rewrites_earlier_turns() -> None:
    tokenizer = make_tokenizer(REWRITING_TEMPLATE)
    documents = encode_records(tokenizer, {"messages": CONVERSATION})
    assert [trained for _, trained in documents] == ["(thinks) Paris.</s>\n", "(thinks) The quick brown fox.</s>\n"]
    assert documents[0][0] == rendered(CONVERSATION[:3]).replace("Paris", "(thinks) Paris")
    assert documents[1][0] == rendered(CONVERSATION).replace("The quick", "(thinks) The quick")
    # One turn of the assistant is one document, as ever.
    assert len(encode_records(tokenizer, {"messages": CONVERSATION[:3]})) == 1


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_prompt_and_completion_as_messages(template: str) -> None:
    tokenizer = make_tokenizer(template)
    lists = {"prompt": CONVERSATION[:4], "completion": CONVERSATION[4:]}
    assert encode_records(tokenizer, lists) == [(rendered(CONVERSATION), "The quick brown fox.</s>\n")]
    mixed = {"prompt": "What is the capital of France?", "completion": [CONVERSATION[2]]}
    assert encode_records(tokenizer, mixed) == [(rendered(CONVERSATION[1:3]), "Paris.</s>\n")]
    mixed = {"prompt": [CONVERSATION[1]], "completion": "Paris."}
    assert encode_records(tokenizer, mixed) == [(rendered(CONVERSATION[1:3]), "Paris.</s>\n")]


def test_order_is_kept() -> None:
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    chat = Chat(CONVERSATION[1:3])
    texts = [whole for whole, _ in encode(tokenizer, Plain("", "A"), chat, Plain("", "B"), Plain("C", "D"), chat)]
    assert texts == ["<s>A</s>", rendered(chat.messages), "<s>B</s>", "<s>CD</s>", rendered(chat.messages)]


def test_keys_of_other_records_do_not_reach_the_template() -> None:
    template = "{% for m in messages %}{% for key, value in m.items() %}{{ key }}={{ value }};{% endfor %}{% endfor %}"
    tokenizer = make_tokenizer(template)
    message = {"role": "assistant", "content": "A", "name": None, "tool_calls": [{"arguments": {"x": 1, "y": None}}]}
    [(whole, _)] = encode_records(tokenizer, {"messages": [message]})
    assert whole == "role=assistant;content=A;tool_calls=[{'arguments': {'x': 1}}];</s>"


@pytest.mark.parametrize(
    ("template", "record", "told"),
    [
        (None, {"messages": CONVERSATION}, ["data.jsonl, line 1", "no chat template"]),
        ("{{ raise_exception('no system role') }}", {"messages": CONVERSATION}, ["line 1", "no system role", "user"]),
        (PLAIN_TEMPLATE, {"messages": "hello"}, ["line 1", "messages", "hello"]),
        (PLAIN_TEMPLATE, {"messages": [{"from": "human", "value": "x"}]}, ["line 1", "human", "role"]),
        (PLAIN_TEMPLATE, {"text": ["a"]}, ["line 1", "'text' is a list"]),
        (PLAIN_TEMPLATE, {"a": 1, "conversations": []}, ["data.jsonl", "a, conversations", "messages", "instruction"]),
    ],
)
def test_errors(template: str | None, record: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(UserError) as error:
        encode_records(make_tokenizer(template), record)
    assert all(word in str(error.value) for word in told), error.value
