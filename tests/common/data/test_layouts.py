"""Every layout that data files use: what of it the model sees, what carries loss, and what is counted or an error."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from common.data import DataConfig, open_data
from common.data.encode import Encoder
from common.data.examples import ItemKind, class_kind, examples_of_records, pair_kind, pairs_of_records
from common.data.read import DataRecord
from common.errors import UserError
from common.files import preset_files
from tests.common.data.conftest import PLAIN_TEMPLATE, REWRITING_TEMPLATE, make_tokenizer, write_records

ALPACA = preset_files("chat_templates", ".jinja")["alpaca"].read_text()
ASK, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}
BAD = {"role": "assistant", "content": "No."}
SYSTEM = {"role": "system", "content": "Be kind."}
TALK = "<s><|turn|>user\nHi?</s>\n<|turn|>assistant\n«Yes.</s>\n»"
KIND = TALK.replace("<s>", "<s><|turn|>system\nBe kind.</s>\n", 1)


def shown(tokenizer: PreTrainedTokenizerFast, documents: Any) -> list[str]:
    """Texts of documents, with « and » around what carries loss."""
    texts = []
    for document in documents:
        text, before = "", False
        for token, carries in zip(document.ids.tolist(), document.trained.tolist(), strict=True):
            text += ("«" if carries else "»") * (carries != before) + str(tokenizer.decode([token]))
            before = carries
        texts.append(text + "»" * before)
    return texts


def read(record: dict[str, Any], template: str | None = PLAIN_TEMPLATE, **options: Any) -> list[str]:
    tokenizer = make_tokenizer(template)
    examples = examples_of_records([DataRecord(record, Path("data.jsonl"), "line 1")])
    return shown(tokenizer, Encoder(tokenizer, **options).encode(examples))


def pairs(record: dict[str, Any], template: str | None = PLAIN_TEMPLATE) -> list[str]:
    tokenizer = make_tokenizer(template)
    [item] = pairs_of_records([DataRecord(record, Path("data.jsonl"), "line 1")])
    return shown(tokenizer, Encoder(tokenizer, is_alone=True).encode(item.examples))


@pytest.mark.parametrize(("record", "expected"), [
    ({"messages": json.dumps([ASK, ANSWER])}, TALK),
    ({"messages": [ASK, ANSWER], "system": "Be kind."}, KIND),
    ({"messages": [SYSTEM, ASK, ANSWER], "system": "Be kind."}, KIND),
    ({"conversations": [ASK, ANSWER], "system": "Be kind."}, KIND),
    ({"prompt": "Hi?", "completion": "Yes.", "system": "Be kind."}, KIND),
    ({"prompt": "Hi?", "completion": [ASK, ANSWER]}, TALK),
    ({"prompt": [ASK], "completion": [SYSTEM, ASK, ANSWER]}, KIND),
    ({"instruction": "Hi?", "input": "", "output": "Yes."}, TALK),
    ({"instruction": "Hi?", "output": "Yes.", "system": "Be kind."}, KIND),
    ({"instruction": "Hi", "input": "there?", "output": "Yes."}, TALK.replace("Hi?", "Hi\nthere?")),
    ({"instruction": "Hi?", "output": "Yes.", "history": [["A", "B"]]},
     TALK.replace("<|turn|>user", "<|turn|>user\nA</s>\n<|turn|>assistant\n«B</s>\n»<|turn|>user", 1)),
    ({"messages": [{"role": "user", "content": [{"type": "text", "value": "Hi?"}]}, ANSWER]}, TALK),
    ({"prompt": "Hi?", "completion": [ASK, ANSWER], "system": "Be kind."}, KIND),
    ({"prompt": "Hi?", "completion": [SYSTEM, ASK, ANSWER], "system": "Be kind."}, KIND),
    ({"prompt": "Hi?", "completion": "Yes.", "history": [["A", "B"]]},
     TALK.replace("<|turn|>user", "<|turn|>user\nA</s>\n<|turn|>assistant\nB</s>\n<|turn|>user", 1)),
    ({"messages": [], "conversations": [ASK, ANSWER]}, TALK),
    ({"messages": "", "prompt": [ASK], "completion": "Yes."}, TALK),
    ({"prompt": "Hi? It is late.", "completion": [ANSWER], "context": "It is late."},
     TALK.replace("Hi?", "Hi? It is late.")),
])  # fmt: skip
def test_conversations(record: dict[str, Any], expected: str) -> None:
    assert read(record) == [expected]


PAIR = [TALK, TALK.replace("Yes", "No")]


@pytest.mark.parametrize("record", [
    {"prompt": "Hi?", "chosen": [ASK, ANSWER], "rejected": [ASK, BAD]},  # UltraFeedback
    {"prompt": [ASK], "chosen": [ASK, ANSWER], "rejected": [ASK, BAD]},
    {"prompt": [ASK], "chosen": ANSWER, "rejected": BAD},
    {"prompt": "", "instruction": "Hi?", "chosen": "Yes.", "rejected": "No."},
    {"question": "Hi?", "chosen": [ASK, ANSWER], "rejected": [ASK, BAD]},
    {"chosen": [ASK, ANSWER], "rejected": [ASK, BAD]},
    {"instruction": "Hi?", "chosen": "Yes.", "rejected": "No."},
    {
        "conversations": [{"from": "human", "value": "Hi?"}],
        "chosen": {"from": "gpt", "value": "Yes."},
        "rejected": {"from": "gpt", "value": "No."},
    },
    {"input": {"messages": [ASK], "tools": []}, "preferred_output": [ANSWER], "non_preferred_output": [BAD]},
])  # fmt: skip
def test_pairs(record: dict[str, Any]) -> None:
    assert pairs(record) == PAIR


def test_of_conversations_one_of_which_continues_the_other_the_last_turn_is_the_answer() -> None:
    longer = [ASK, ANSWER, ASK, BAD]
    assert pairs({"chosen": [ASK, ANSWER], "rejected": longer}) == [
        TALK, TALK + "<|turn|>user\nHi?</s>\n<|turn|>assistant\n«No.</s>\n»",
    ]  # fmt: skip


@pytest.mark.parametrize("template", [None, ALPACA])
def test_instructions_are_alpacas_text_without_a_template_or_with_its(
    template: str | None, tmp_path: Path
) -> None:
    record = {"instruction": "Say it.", "input": "fox", "output": "The fox"}
    [text] = read(record, template)
    assert text.endswith("### Instruction:\nSay it.\n\n### Input:\nfox\n\n### Response:\n«The fox</s>»")
    file = write_records(tmp_path / "a.jsonl", [record])
    for used, words in ((template, "Alpaca's texts"), (PLAIN_TEMPLATE, "user and assistant turns")):
        config = DataConfig((file,), 400, 1)
        description = open_data(config, make_tokenizer(used), tmp_path / "cache").description
        assert f"instructions: 1 record; first {file}, line 1; {words}" in description


@pytest.mark.parametrize(("record", "expected"), [
    ({"text": "<s>A</s>"}, "<s>«A</s>»"),
    ({"text": "A</s>\n"}, "«<s>A</s>\n»"),  # two line breaks are one token here, and still only white space
    ({"text": "A</s> b"}, "«<s>A</s> b</s>»"),
    ({"prompt": "<s>A", "completion": " b"}, "<s>A« b</s>»"),
    ({"prompt": "A</s>", "completion": " b"}, "<s>A</s>« b</s>»"),
])  # fmt: skip
def test_neither_bos_nor_eos_is_doubled(record: dict[str, Any], expected: str) -> None:
    assert [text.replace("«<s>", "<s>«") for text in read(record)] == [expected.replace("«<s>", "<s>«")]


def test_rewards_read_texts_to_their_end(tmp_path: Path) -> None:
    """Whether or not the texts begin alike."""
    tokenizer, records = make_tokenizer(), [{"chosen": "the fox", "rejected": "a dog"}]
    records.append({"prompt": "", "chosen": "the fox", "rejected": "the dog"})
    file = write_records(tmp_path / "a.jsonl", records)
    batches = open_data(
        DataConfig((file,), 32, 2, kind=pair_kind(classifies=True)), tokenizer, tmp_path / "cache"
    )
    batch = batches.batch(0)
    texts = [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(*map(batch.get, ("input_ids", "attention_mask")),
                                                                     strict=True)]  # type: ignore[arg-type]  # fmt: skip
    assert sorted(texts) == ["<s>a dog</s>", "<s>the dog</s>", "<s>the fox</s>", "<s>the fox</s>"]


def test_every_token_of_a_conversation_once() -> None:
    talk = [ASK, {**ANSWER, "content": "A"}, ASK, {**ANSWER, "content": "B"}]
    assert len(read({"messages": talk}, REWRITING_TEMPLATE)) == 2
    [text] = read({"messages": talk}, REWRITING_TEMPLATE, every_token=True)
    assert text.startswith("«<s>") and text.count("Hi?") == 2 and text.count("»") == 1
    assert read({"messages": [ASK]}, every_token=True) == ["«<s><|turn|>user\nHi?</s>\n»"]


def test_a_chat_that_begins_with_the_assistant() -> None:
    first = PLAIN_TEMPLATE.replace(
        "{% for", "{% if messages[0]['role'] != 'system' %}default{% endif %}{% for", 1
    )
    [text] = read({"messages": [ANSWER, ASK, BAD]}, first)
    assert (
        text
        == "<s>default<|turn|>assistant\n«Yes.</s>\n»<|turn|>user\nHi?</s>\n<|turn|>assistant\n«No.</s>\n»"
    )


@pytest.mark.parametrize(("record", "words"), [
    ({"messages": [ASK, ANSWER], "tools": [{"name": "f"}]}, "line 1: the chat template leaves out tools"),
    ({"messages": [SYSTEM, ASK, ANSWER], "system": "Be rude."}, "line 1 has a 'system' column, and a conversation"),
    ({"messages": [ASK, {**ANSWER, "reasoning_content": "why"}]}, "leaves out 'reasoning_content' of turn 2"),
    ({"instruction": "Hi?", "output": "Yes.", "history": ["A"]}, "line 1: 'history' is not a list of"),
    ({"messages": [ASK, ANSWER], "history": [["A", "B"]]}, "line 1 has a 'history' column and 'messages'"),
    ({"messages": [ASK, {"role": "assistant", "refusal": "No."}]}, "leaves out 'refusal' of turn 2"),
    ({"messages": [ASK, ANSWER], "functions": [{"name": "f"}]}, "line 1: the chat template leaves out tools"),
    ({"messages": [ASK, ANSWER], "images": ["a.png"]}, "line 1 has 'images', which is not read here"),
    ({"prompt": "Hi?", "completion": "Yes.", "videos": ["a.mp4"]}, "line 1 has 'videos', which is not read here"),
    ({"prompt": "Hi?", "completion": [BAD | {"role": "user"}, ANSWER]}, "line 1: the answer is a conversation"),
    ({"instruction": "Hi?", "output": "Yes.", "context": "It is late."}, "line 1 has 'context', which 'instruction'"),
    ({"prompt": "Hi?", "completion": "Yes.", "input": "It is late."}, "line 1 has 'input', which 'prompt'"),
])  # fmt: skip
def test_what_the_template_leaves_out_is_an_error_or_counted(
    record: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        read(record)
    if "leaves out" in words:
        file = write_records(tmp_path / "a.jsonl", [{"messages": [ASK, ANSWER]}, record])
        config = DataConfig((file,), 64, 1, drop_unseen=True)
        said = open_data(config, make_tokenizer(PLAIN_TEMPLATE), tmp_path / "cache").description
        assert (
            said.startswith("1 document ") and f"left out: 1 record; first {file}, line 2; text that" in said
        )


CLASSES = class_kind({"LABEL_0": 0, "LABEL_1": 1})


@pytest.mark.parametrize(("kind", "good", "left_out"), [
    (None, {"text": "a fox"}, [{"text": " "}, {"prompt": "a", "completion": ""}, {"messages": []}]),
    (None, {"text": "a fox"}, [{"instruction": "a", "output": ""}, {"messages": [ASK, {**ANSWER, "content": ""}]}]),
    (pair_kind(), {"prompt": "a", "chosen": " b", "rejected": ""}, [{"chosen": "", "rejected": "b", "prompt": "a"}]),
    (CLASSES, {"text": "a fox", "label": 1}, [{"text": " ", "label": 0}]),
])  # fmt: skip
def test_records_without_an_answer_are_counted(
    kind: ItemKind | None, good: dict[str, Any], left_out: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = write_records(tmp_path / "a.jsonl", [good, good, *left_out])
    opened = open_data(DataConfig((file,), 64, 2, kind=kind), make_tokenizer(PLAIN_TEMPLATE), tmp_path)
    number = f"{len(left_out)} record{'s' * (len(left_out) > 1)}"
    assert opened.description.startswith("2 ")
    assert f"left out: {number}; first {file}, line 3; no text, or an empty answer" in opened.description


def test_long_texts_with_a_class_are_counted(tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", [{"text": "dog " * n, "label": n % 2} for n in (1, 60)])
    for truncate, words in ((True, "cut: 1 record, "), (False, "left out: 1 record, ")):
        config = DataConfig((file,), 32, 1, truncate=truncate, kind=CLASSES)
        assert words in open_data(config, make_tokenizer(), tmp_path / "cache").description
    wrong = write_records(tmp_path / "b.jsonl", [{"text": "a", "label": 2}])
    with pytest.raises(UserError, match="line 1 has the label '2'"):
        open_data(DataConfig((wrong,), 32, 1, kind=CLASSES), make_tokenizer(), tmp_path / "cache")


def test_tokens_that_the_model_does_not_know(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    file = write_records(tmp_path / "a.jsonl", [{"text": "fox"}, {"text": "fox <new>"}])
    tokenizer.add_tokens(["<new>"])
    size = len(tokenizer) - 1
    with pytest.raises(
        UserError, match=rf"line 2: '<new>' is token {size}, and the model knows {size} tokens"
    ):
        open_data(DataConfig((file,), 32, 1, vocab_size=size), tokenizer, tmp_path)
    open_data(DataConfig((file,), 32, 1, vocab_size=size + 1), tokenizer, tmp_path)


REASONING = {  # as LLaMA-Factory's reasoning with tools, shortened
    "messages": [
        {"role": "user", "content": [{"type": "text", "value": "Which schools are near?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "reasoning", "value": "No tool for that."},
                {"type": "tool_call", "value": '{"name": "find", "arguments": {"near": "Rome"}}'},
            ],
        },
        {"role": "tool", "content": [{"type": "text", "value": "none"}]},
        {
            "role": "assistant",
            "content": [{"type": "reasoning", "value": "So none."}, {"type": "text", "value": "None."}],
        },
    ],
    "tools": '[{"type": "function", "function": {"name": "find", "parameters": {}}}]',
}


def test_reasoning_and_calls_in_parts() -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.reasoning_content is defined %}"
        "({{ m.reasoning_content }}){% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    [text] = read(REASONING, template)
    assert text.removeprefix(str(REASONING["tools"])) == (
        "<|turn|>user\nWhich schools are near?</s>\n<|turn|>assistant\n"
        '«(No tool for that.)find{"near": "Rome"}</s>\n»'
        "<|turn|>tool\nnone</s>\n<|turn|>assistant\n«(So none.)None.</s>\n»"
    )


def test_tools_are_in_openais_format_and_all_of_them_are_described() -> None:
    """Templates are written for it: those that read ``tool.function`` would write nothing of a bare function."""
    function = {"name": "find", "description": "Finds a thing."}
    template = "{{ tools | tojson }}" + PLAIN_TEMPLATE
    for columns in ({"tools": [function]}, {"functions": [function]}, {"tools": json.dumps([function])}):
        [text] = read({"messages": [ASK, ANSWER], **columns}, template)
        assert text.removesuffix(TALK) == json.dumps([{"type": "function", "function": function}])
    names_alone = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + PLAIN_TEMPLATE
    with pytest.raises(UserError, match=r"line 1: the chat template leaves out .* of tools"):
        read({"messages": [ASK, ANSWER], "tools": [function]}, names_alone)
    with pytest.raises(UserError, match=r"line 1: the chat template leaves out .* of documents"):
        read({"messages": [ASK, ANSWER], "documents": [{"title": "A", "contents": "B"}]},
             "{% for one in documents %}{{ one.title }}{{ one.text }}{% endfor %}" + PLAIN_TEMPLATE)  # fmt: skip


def test_padding_is_a_token_that_the_model_knows(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    size = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    file = write_records(tmp_path / "a.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "the fox"}])
    config = DataConfig((file,), 32, 1, vocab_size=size, kind=pair_kind())
    assert open_data(config, tokenizer, tmp_path / "pairs").batch(0)["input_ids"].max() < size
    text = write_records(tmp_path / "b.jsonl", [{"text": "fox"}])
    config = DataConfig((text,), 32, 1, vocab_size=size)
    assert open_data(config, tokenizer, tmp_path / "texts").batch(0)["input_ids"].max() < size
