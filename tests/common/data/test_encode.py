"""Which tokens carry loss, for every record shape: read back by decoding just those."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common.data import DataConfig, open_data
from common.data.encode import Encoder, RowFitter
from common.data.examples import Example, PlainText, examples_of_records
from common.data.read import DataRecord, read_records
from common.errors import UserError
from tests.common.data.conftest import (
    MARKED_TEMPLATE,
    PLAIN_TEMPLATE,
    REWRITING_TEMPLATE,
    make_tokenizer,
    numbered,
    write_records,
)

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
        trained += [
            token for token, bit in zip(encoded.ids.tolist(), encoded.trained.tolist(), strict=True) if bit
        ]
        if encoded.ends:
            documents.append((tokenizer.decode(ids), tokenizer.decode(trained)))
            ids, trained = [], []
    assert not ids
    return documents


def encode_records(tokenizer: PreTrainedTokenizerFast, *records: dict[str, Any]) -> list[tuple[str, str]]:
    return encode(tokenizer, *examples_of_records(numbered(records)))


@pytest.mark.parametrize("bos", [True, False])
def test_text(bos: bool) -> None:
    tokenizer = make_tokenizer(bos=bos)
    start = "<s>" if bos else ""
    whole = f"{start}The fox.</s>"
    assert encode_records(tokenizer, {"text": "The fox."}, {"text": " "}, {"text": None}) == [(whole, whole)]
    ids = next(Encoder(tokenizer).encode([PlainText("", "The fox.")])).ids.tolist()
    assert ids == [*tokenizer("The fox.")["input_ids"], tokenizer.eos_token_id]


def test_no_eos() -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    assert encode_records(tokenizer, {"text": "A"}) == [("<s>A", "<s>A")]


PIECES = ["The", "quick fox", " ", "\n", "  \n", "\t", "é", "字字字", "x" * 40, "12345."]


# Of Llama 2: a space before every text
@pytest.mark.parametrize("normalizer", [None, normalizers.Prepend(" ")])
@settings(max_examples=40)
@given(words=st.lists(st.sampled_from(PIECES), max_size=80))
def test_a_text_in_segments_has_the_tokens_of_the_whole(normalizer: Any, words: list[str]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizer
    text = "".join(words) + "."
    whole = [1, *tokenizer(text, add_special_tokens=False)["input_ids"], 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.data.encode.SEGMENT_CHARACTERS", 32)
        parts = list(Encoder(tokenizer).encode(examples_of_records(numbered([{"text": text}]))))
        assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
        assert [token for part in parts for token in part.ids.tolist()] == whole


def test_a_text_without_a_clean_cut_is_tokenized_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer whose tokens hold several words, as one without a pre-tokenizer has."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.backend_tokenizer.train_from_iterator(["a b " * 50] * 9, trainer)
    monkeypatch.setattr("common.data.encode.SEGMENT_CHARACTERS", 64)
    text = "a b " * 50
    [part] = Encoder(tokenizer).encode(examples_of_records(numbered([{"text": text}])))
    assert part.ids.tolist() == [1, *tokenizer(text, add_special_tokens=False)["input_ids"], 2]


def test_a_row_of_65536_tokens_comes_from_pieces_of_one_line(tmp_path: Path) -> None:
    tokenizer, file = make_tokenizer(), tmp_path / "a.txt"
    text = "The quick brown fox jumps over the lazy dog. " * 10_000
    file.write_text(text)
    parts = list(Encoder(tokenizer).encode(examples_of_records(read_records(file))))
    assert [part.ends for part in parts] == [False] * 3 + [True]
    batches = open_data(DataConfig((str(file),), 65_536, 1, shuffle=False), tokenizer, tmp_path / "cache")
    assert (
        batches.batch(0)["input_ids"][0].tolist()
        == [1, *tokenizer(text, add_special_tokens=False)["input_ids"]][:65_536]
    )


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
        [encoded] = Encoder(tokenizer).encode([PlainText(text[:at], text[at:])])
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
    assert [trained for _, trained in encode_records(tokenizer, *records)] == [
        "<s>A</s>",
        "C</s>",
        "<s>D</s>",
    ]


def rendered(messages: list[dict[str, str]]) -> str:
    return "<s>" + "".join(f"<|turn|>{m['role']}\n{m['content']}</s>\n" for m in messages)


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_messages_that_end_with_the_user(template: str) -> None:
    tokenizer = make_tokenizer(template.replace("</s>", "<|turn|>"))
    [(whole, trained)] = encode_records(tokenizer, {"messages": CONVERSATION[:4]})
    assert whole.endswith("Thank you!<|turn|>\n"), (
        "a conversation is what its template writes, without another EOS"
    )
    assert trained.rstrip() == "Paris.<|turn|>"


def test_template_that_rewrites_earlier_turns() -> None:
    tokenizer = make_tokenizer(REWRITING_TEMPLATE)
    documents = encode_records(tokenizer, {"messages": CONVERSATION})
    assert [trained for _, trained in documents] == [
        "(thinks) Paris.</s>\n",
        "(thinks) The quick brown fox.</s>\n",
    ]
    assert documents[0][0] == rendered(CONVERSATION[:3]).replace("Paris", "(thinks) Paris")
    assert documents[1][0] == rendered(CONVERSATION).replace("The quick", "(thinks) The quick")
    # One turn of the assistant is one document, as ever.
    assert len(encode_records(tokenizer, {"messages": CONVERSATION[:3]})) == 1


def test_keys_of_other_records_do_not_reach_the_template(tmp_path: Path) -> None:
    """In a table every message has the keys of all others; in JSON, null is what somebody wrote."""
    template = (
        "{% for m in messages %}{% for key, value in m.items() %}"
        "{{ key }}={{ value if value is string else value | tojson }};{% endfor %}{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    call = {"function": {"name": "f", "arguments": {"x": 1, "y": None}}}
    message = {"role": "assistant", "content": "A", "name": None, "tool_calls": [call]}
    other = {"role": "assistant", "content": "B", "name": "n", "tool_calls": None}
    for name, arguments in [
        ("a.jsonl", '{"x": 1, "y": null}'),
        ("a.json", '{"x": 1, "y": null}'),
        ("a.parquet", '{"x": 1}'),
    ]:
        path = Path(write_records(tmp_path / name, [{"messages": [message]}, {"messages": [other]}]))
        [(first, _), (second, _)] = encode(tokenizer, *examples_of_records(read_records(path)))
        call_written = '{"function": {"name": "f", "arguments": ' + arguments + "}}"
        assert sorted(first.split(";")) == [
            "", "content=A", "role=assistant", f"tool_calls=[{call_written}]",
        ]  # fmt: skip
        assert sorted(second.split(";")) == ["", "content=B", "name=n", "role=assistant"]


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "default": None}}}
]
TOOL_TEMPLATE = (
    "{% if tools %}<|turn|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% if documents %}{% for d in documents %}{{ d['text'] }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{% if m['content'] is defined %}{{ m['content'] }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{% if style %}{{ style }}{% endif %}</s>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def calls(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "In Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is sunny."},
    ]


@pytest.mark.parametrize("arguments", [{"city": "Paris", "day": None}, '{"city": "Paris", "day": null}'])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_and_calls_reach_the_template(arguments: Any, tools: Any) -> None:
    """Arguments are an object or, as in OpenAI's format, a string of JSON."""
    tokenizer = make_tokenizer(TOOL_TEMPLATE)
    record = {
        "messages": calls(arguments),
        "tools": tools,
        "documents": [],
        "chat_template_kwargs": {"style": "!"},
    }
    expected = (
        f"<|turn|>tools\n{json.dumps(TOOLS[0])}\n<|turn|>user\nIn Paris?!</s>\n<|turn|>assistant\n"
        'weather({"city": "Paris", "day": null})!</s>\n<|turn|>tool\nsunny!</s>\n<|turn|>assistant\nIt is sunny.!</s>\n'
    )
    answers = 'weather({"city": "Paris", "day": null})!</s>\nIt is sunny.!</s>\n'
    assert encode_records(tokenizer, record) == [(expected, answers)]
    [example] = Encoder(tokenizer).encode(examples_of_records(numbered([record])))
    assert example.ids.tolist() == tokenizer(expected, add_special_tokens=False)["input_ids"]
    split = {
        **record,
        "messages": None,
        "prompt": record["messages"][:3],
        "completion": record["messages"][3:],
    }
    assert encode_records(tokenizer, split) == [(expected, "It is sunny.!</s>\n")]
    marked = make_tokenizer(
        TOOL_TEMPLATE.replace("{% if m['content'] is", "{% generation %}{% if m['content'] is").replace(
            "</s>\n{% endfor %}", "</s>{% endgeneration %}{{ '\\n' }}{% endfor %}"
        )
    )
    # This one marks what everybody says, which is not believed.
    assert encode_records(marked, record) == [(expected, answers)]


@pytest.mark.parametrize("edge", ["\N{PARTY POPPER}", "\N{ZERO WIDTH SPACE}", " "])
@pytest.mark.parametrize("marks_end", [True, False])
def test_marked_answers_with_several_tokens_or_none_for_a_character(edge: str, marks_end: bool) -> None:
    """transformers' mask ends within such an answer, lacks it and all later ones, or has the user's turns, too."""
    end = "</s>{% endgeneration %}" if marks_end else "{% endgeneration %}</s>"
    tokenizer = make_tokenizer(MARKED_TEMPLATE.replace("</s>{% endgeneration %}", end))
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\N{ZERO WIDTH SPACE}", "")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as GPT-NeoX has it
    answer = f"{edge}Paris.{edge}"
    chat = [{**turn, "content": answer} if turn["content"] == "Paris." else turn for turn in CONVERSATION]
    seen = answer.replace("\N{ZERO WIDTH SPACE}", "")
    [(_, trained)] = encode_records(tokenizer, {"messages": chat})
    assert trained == f"{seen}</s>The quick brown fox.</s>"


@pytest.mark.parametrize("written", ["c.function.arguments", "c.function.arguments + ''"])
@pytest.mark.parametrize("arguments", [{"city": "Paris", "day": None}, '{"city": "Paris", "day": null}'])
def test_a_template_that_takes_arguments_as_text_alone_gets_text(arguments: Any, written: str) -> None:
    """With an object, one writes what Python does, and the other fails."""
    tokenizer = make_tokenizer(TOOL_TEMPLATE.replace("c.function.arguments | tojson", written))
    [(whole, _)] = encode_records(tokenizer, {"messages": calls(arguments)})
    assert 'weather({"city": "Paris", "day": null})' in whole


def test_documents_reach_the_template() -> None:
    tokenizer = make_tokenizer(TOOL_TEMPLATE)
    [(whole, _)] = encode_records(
        tokenizer, {"messages": CONVERSATION[1:3], "documents": [{"text": "A fact."}]}
    )
    assert whole == "A fact.\n" + rendered(CONVERSATION[1:3]).removeprefix("<s>")


def test_content_in_parts_as_the_template_takes_it() -> None:
    """PLAIN_TEMPLATE would write Python's lists, another fails over them."""
    adding = PLAIN_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] + '' }}")
    parts = [{"type": "text", "text": "Pa"}, {"type": "text", "text": "ris."}]
    chat = [CONVERSATION[1], {"role": "assistant", "content": parts}]
    for template in (PLAIN_TEMPLATE, adding):
        tokenizer = make_tokenizer(template)
        assert encode_records(tokenizer, {"messages": chat}) == [
            (rendered(CONVERSATION[1:3]), "Paris.</s>\n")
        ]
        with pytest.raises(UserError, match=r"line 1: content has a part .*image.* takes text only"):
            encode_records(
                tokenizer, {"messages": [{"role": "user", "content": [{"type": "image"}]}, CONVERSATION[2]]}
            )
    taking = "{% for m in messages %}{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endfor %}"
    [(whole, _)] = encode_records(make_tokenizer(taking), {"messages": chat[1:]})
    assert whole == "[Paris.]"


def weighted(*weights: int | None) -> list[dict[str, Any]]:
    """CONVERSATION with these weights of the assistant's turns."""
    answers = [number for number, message in enumerate(CONVERSATION) if message["role"] == "assistant"]
    given = dict(zip(answers, weights, strict=True))
    return [
        message if given.get(number) is None else {**message, "weight": given[number]}
        for number, message in enumerate(CONVERSATION)
    ]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE, REWRITING_TEMPLATE])
@pytest.mark.parametrize("weights", [(0, 1), (1, 0), (0, None), (None, 0.0), (1, 1.0), (None, None)])
def test_weights_of_turns(template: str, weights: tuple[Any, Any]) -> None:
    tokenizer = make_tokenizer(template)
    documents = encode_records(tokenizer, {"messages": weighted(*weights)})
    thinks = "(thinks) " if template == REWRITING_TEMPLATE else ""
    closing = "</s>" if template == MARKED_TEMPLATE else "</s>\n"
    answers = [f"{thinks}Paris.{closing}", f"{thinks}The quick brown fox.{closing}"]
    kept = [answer for answer, weight in zip(answers, weights, strict=True) if weight != 0]
    if thinks:
        assert [trained for _, trained in documents] == kept
    else:
        assert documents == [(rendered(CONVERSATION), "".join(kept))]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_weights_in_completions_and_conversations_without_any_loss(template: str) -> None:
    tokenizer = make_tokenizer(template)
    messages = weighted(0, 1)
    record = {"prompt": messages[:2], "completion": messages[2:]}
    [(whole, trained)] = encode_records(tokenizer, record)
    assert whole == rendered(CONVERSATION) and trained.endswith("The quick brown fox.</s>\n")
    assert "Paris" not in trained and "Thank you!" not in trained, (
        "a user's turn carries no loss, in a completion too"
    )
    assert encode_records(tokenizer, {"messages": weighted(0, 0)}) == []


@pytest.mark.parametrize(("turn", "told"), [
    ({"role": "asistant", "content": "a"}, ["line 1", "'asistant'", "Did you mean 'assistant'?"]),
    ({"role": 3, "content": "a"}, ["line 1: turn 2 of 'messages' is not", "'role': 3"]),
    ({"role": "assistant", "content": 3}, ["line 1: turn 2 of 'messages': 'content' is 3, expected text"]),
    ({"role": "assistant", "content": "a", "weight": 0.5}, ["line 1: turn 2", "weight 0.5", "0", "1"]),
    ({"role": "assistant", "content": "a", "weight": True}, ["weight true"]),
    ({"role": "assistant", "content": "a", "weight": "0"}, ['weight "0"']),
    ({"role": "user", "content": "a", "weight": 1}, ["role user", "weight 1"]),
    ({"role": "assistant", "tool_calls": calls({})[1]["tool_calls"]},
     ["line 1", "leaves out 'tool_calls' of turn 2 (assistant): 'weather'"]),
])  # fmt: skip
def test_turns_that_would_be_trained_on_as_something_else(turn: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(UserError) as error:
        encode_records(make_tokenizer(PLAIN_TEMPLATE), {"messages": [CONVERSATION[1], turn]})
    assert all(word in str(error.value) for word in told), error.value


@pytest.mark.parametrize(("columns", "told"), [
    ({"chat_template_kwargs": {"enable_thinking": False}}, ["line 1", "leaves out enable_thinking"]),
    ({"tools": "weather"}, ["line 1: 'tools' is not a list of objects", "weather"]),
    ({"tools": ["weather"]}, ["line 1: 'tools' is not a list of objects"]),
    ({"chat_template_kwargs": [1]}, ["line 1: 'chat_template_kwargs' is not an object"]),
])  # fmt: skip
def test_columns_that_the_template_would_leave_out(columns: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(UserError) as error:
        encode_records(make_tokenizer(PLAIN_TEMPLATE), {"messages": CONVERSATION, **columns})
    assert all(word in str(error.value) for word in told), error.value


@pytest.mark.parametrize(("template", "record", "told"), [
    (None, {"messages": CONVERSATION}, ["data.jsonl, line 1", "no chat template"]),
    ("{{ raise_exception('no system role') }}", {"messages": CONVERSATION}, ["line 1", "no system role", "user"]),
    (PLAIN_TEMPLATE, {"messages": "hello"}, ["line 1", "messages", "hello"]),
    (PLAIN_TEMPLATE, {"messages": [{"from": "humam", "value": "x"}]}, ["line 1: turn 1", "Did you mean 'human'?"]),
    (PLAIN_TEMPLATE, {"text": ["a"]}, ["line 1", "'text' is a list"]),
    (PLAIN_TEMPLATE, {"question": 1, "answer": "b"}, ["question, answer", "instruction", "prompt=question"]),
])  # fmt: skip
def test_errors(template: str | None, record: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(UserError) as error:
        encode_records(make_tokenizer(template), record)
    assert all(word in str(error.value) for word in told), error.value


def test_answers_that_nothing_ends_are_counted_and_said() -> None:
    """A tokenizer that spells the template's marks in pieces: the model would learn the spelling, and never stop."""
    chatml = PLAIN_TEMPLATE.replace("</s>", "<|im_end|>").replace("<|turn|>", "<|im_start|>")
    for template, endless in ((chatml, 2), (PLAIN_TEMPLATE, 0)):
        fitter = RowFitter()
        encoder = Encoder(make_tokenizer(template), fitter)
        for number in (1, 2):
            record = DataRecord({"messages": CONVERSATION}, Path("data.jsonl"), f"line {number}")
            list(encoder.encode(examples_of_records([record])))
        assert fitter.endless.records == endless
        told = [
            line
            for line in fitter.changes()
            if line.startswith("without an end: 2 records; first data.jsonl, line 1")
        ]
        assert len(told) == (endless > 0)
