"""Columns and keys that nothing reads are named with their count, or refused where other tools train by them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.data import DataConfig, open_data
from common.data.examples import class_kind, columns_read, examples_of_records, pair_kind
from common.data.read import DataRecord
from common.data.selection import Counts, RecordSelection
from common.data.unread_columns import noted
from common.errors import UserError
from tests.common.data.conftest import PLAIN_TEMPLATE, make_tokenizer, write_records

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", "ts": 3, "id": "a"}]
QUESTION = {"prompt": "Capital of France?", "completion": "Paris"}


def described(file: str, folder: Path, template: str | None = PLAIN_TEMPLATE, **columns: str) -> list[str]:
    """Return the lines of the header about a data file."""
    config = DataConfig((file,), 512, 1, selection=RecordSelection(columns))
    return open_data(config, make_tokenizer(template), folder / "cache").description.split("\n")


def test_what_nothing_reads_is_named_with_its_count(jsonl: Callable[..., str], tmp_path: Path) -> None:
    template = PLAIN_TEMPLATE.replace("{{ m['role'] }}", "{{ m['role'] }}{{ m['ts'] }}")
    file = jsonl(
        {"messages": TURNS, "source": "web", "score": None},
        {
            "messages": TURNS,
            "source": "book",
            "score": 0.5,
            "text": "Hi Yo",
            "system": "Be brief.",
            "tools": [],
        },
    )
    expected = "not read: 'source' (2), 'id' of turns (2), 'score' (1), 'text' (1)"
    assert expected in described(file, tmp_path, template)
    read = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", "weight": 1}]
    assert len(described(jsonl({"messages": read}, name="clean.jsonl"), tmp_path)) == 1
    many = {f"column {number}": 1 for number in range(30)}
    assert (
        "'column 19' (1), others (10)"
        in described(jsonl({"text": "Hi there", **many}, name="b.jsonl"), tmp_path)[-1]
    )


@pytest.mark.parametrize("columns", [
    {"weight": 0.5}, {"loss": False}, {"train": True}, {"input_ids": [1, 2]}, {"completion_mask": [0, 1]},
    {"label": False}, {"kto_tag": "true"}, {"ref_chosen_logps": -1.5}, {"loss_multiplier": 0.0},
    {"segments": [{"label": False, "text": "Hi"}]}, {"type": "TEXT_TO_VALUE"}, {"chosen_ids": [1]},
])  # fmt: skip
def test_what_other_tools_train_by_is_refused(
    columns: dict[str, Any], jsonl: Callable[..., str], tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match=f"line 1 has '{next(iter(columns))}', which is not read here: .*[Ll]eave "
    ):
        described(jsonl({**QUESTION, **columns}), tmp_path)


@pytest.mark.parametrize("key", [
    "loss", "loss_scale", "loss_weight", "masked", "train_detail", "eot", "ipython", "token_loss_mask",
])  # fmt: skip
def test_keys_of_turns_that_other_tools_train_by_are_refused(
    key: str, jsonl: Callable[..., str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"turn 2 of 'messages' has '{key}'"):
        described(jsonl({"messages": [TURNS[0], {"role": "assistant", "content": "Yo", key: 0}]}), tmp_path)


@pytest.mark.parametrize("key", ["train", "weight"])
def test_keys_of_parts_that_other_tools_train_by_are_refused(
    key: str, jsonl: Callable[..., str], tmp_path: Path
) -> None:
    """axolotl trains some parts of a turn and not others."""
    parts = [{"type": "text", "text": "Let me think.", key: 0}, {"type": "text", "text": " Yo"}]
    with pytest.raises(UserError, match=f"turn 2 of 'messages': a part of its content has '{key}'"):
        described(jsonl({"messages": [TURNS[0], {"role": "assistant", "content": parts}]}), tmp_path)


class Watched(dict[str, Any]):
    """A record that knows which of its columns have been read."""

    def __init__(self, values: dict[str, Any]):
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


@pytest.mark.parametrize(("values", "kind"), [
    ({"text": "Hi"}, None),
    ({"messages": TURNS}, None),
    (QUESTION, None),
    ({"instruction": "Capital?", "output": "Paris"}, None),
    ({"prompt": "Capital?", "chosen": "Paris", "rejected": "Rome"}, "pairs"),
    ({"prompt": TURNS[:1], "completion": TURNS[1:]}, None),
    ({"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:], "margin": 2.0}, "pairs"),
    ({"prompt": "Capital?", "chosen": "Paris", "rejected": "Rome", "margin": 2.0}, "margins"),
    ({"text": "Hi", "label": "a"}, "texts"),
])  # fmt: skip
def test_the_columns_that_count_as_read_are_those_that_are_read(
    values: dict[str, Any], kind: str | None
) -> None:
    record = Watched({"score": 1, "ts": 2, **values})
    kinds = {"pairs": pair_kind(), "margins": pair_kind(classifies=True), "texts": class_kind({"a": 0})}
    read = examples_of_records if kind is None else kinds[kind].items
    list(read([DataRecord(record, Path("data.jsonl"), "line 1")]))
    listed = columns_read(dict(record), kind if kind is None else kinds[kind])
    if kind in ("pairs", "margins"):  # a prompt has several names
        record.read -= {"messages", "conversations", "instruction"}
    assert record.read == listed


def test_texts_next_to_turns_that_are_not_in_them_are_named(
    jsonl: Callable[..., str], tmp_path: Path
) -> None:
    """A passage next to a conversation would be left out without a word."""
    turns = [TURNS[0], {"role": "assistant", "content": "Yo"}]
    said = described(jsonl({"messages": turns, "context": "Long."}), tmp_path)
    assert "not read: 'context' (1)" in said


def test_columns_that_others_replace_are_named(jsonl: Callable[..., str], tmp_path: Path) -> None:
    record = {"prompt": "a", "completion": "b c", "question": "q q", "messages": TURNS, "text": ""}
    said = described(jsonl(record), tmp_path, None, prompt="question")
    assert "not read: 'messages' (1), 'prompt' (1)" in said


def test_keys_of_parts_that_nothing_reads_are_named(jsonl: Callable[..., str], tmp_path: Path) -> None:
    image = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,", "detail": "low"},
        "fps": None,
    }
    given = {
        "messages": [{"role": "user", "content": [image, {"type": "text", "text": "a", "citations": [1]}]}]
    }
    counts = Counts()
    list(noted([DataRecord(given, Path("data.jsonl"), "line 1")], counts, None))
    assert counts.unread == {"'citations' of parts": 1, "'detail' of parts": 1}


def test_what_nothing_reads_in_objects_and_in_json_text_is_named(jsonl: Callable[..., str]) -> None:
    """OpenAI's preference format has the prompt in an object; tables often have turns as JSON text."""
    parts = [{"type": "text", "text": "Hi", "citations": [1]}]
    asked, answer = [{"role": "user", "content": parts}], {"role": "assistant", "content": parts}
    openai = {"input": {"messages": asked, "tools": [], "parallel_tool_calls": True, "chosen": "Yo", "margin": 1.0},
              "preferred_output": [answer], "non_preferred_output": [answer], "margin": 2.0, "id": 7}  # fmt: skip
    inside = {"'parallel_tool_calls' of 'input'": 1, "'chosen' of 'input'": 1, "'margin' of 'input'": 1}
    for values, kind, expected in (
        (openai, pair_kind(classifies=True), {**inside, "'citations' of parts": 3, "'id'": 1}),
        (openai, pair_kind(), {**inside, "'citations' of parts": 3, "'id'": 1, "'margin'": 1}),
        ({"messages": json.dumps([*asked, answer])}, None, {"'citations' of parts": 2}),
        ({"conversations": json.dumps([*asked, answer])}, None, {"'citations' of parts": 2}),
        ({"prompt": '[{"content": [{"x": 1}]}]', "completion": "Yo"}, None, {}),  # text, not turns
    ):
        counts = Counts()
        list(noted([DataRecord(values, Path("data.jsonl"), "line 1")], counts, kind))
        assert counts.unread == expected, values
    refused = {**openai, "input": {"messages": asked, "loss": False}}
    with pytest.raises(UserError, match="has 'loss' of 'input', which is not read here"):
        list(noted([DataRecord(refused, Path("data.jsonl"), "line 1")], Counts(), pair_kind()))


def test_keys_of_calls_that_nothing_reads_are_named(jsonl: Callable[..., str], tmp_path: Path) -> None:
    function = {"name": "f", "arguments": {"a": 1}, "strict": True}
    call = {"id": "1", "type": "function", "index": 0, "function": function, "result": "42"}
    template = PLAIN_TEMPLATE.replace(
        "{{ m['content'] }}",
        "{{ m['content'] }}{% if m.tool_calls %}{{ m.tool_calls[0].function }}{% endif %}",
    )
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    said = described(jsonl({"messages": turns}), tmp_path, template)
    assert "not read: 'result' of calls (1), 'strict' of calls (1)" in said
    read = "{# reads strict, and result #}" + template
    assert not [line for line in described(jsonl({"messages": turns}), tmp_path, read) if "not read" in line]


def test_parameters_of_tools_that_a_template_leaves_out_are_an_error(
    jsonl: Callable[..., str], tmp_path: Path
) -> None:
    """Some templates write what is in parameters.properties, and neither input_schema nor definitions."""
    template = (
        "{% for t in tools %}{{ t.function.name }}"
        "({{ t.function.parameters.properties.keys() | join }}){% endfor %}"
    )
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    nested = {"type": "object", "properties": {"at": {"$ref": "#/$defs/At"}}, "$defs": {"At": city}}

    def lines(**schema: Any) -> list[str]:
        tool = {"type": "function", "function": {"name": "city", **schema}}  # the name is there, though
        return described(jsonl({"messages": TURNS, "tools": [tool]}), tmp_path, template + PLAIN_TEMPLATE)

    assert lines(parameters=city)
    for schema in ({"input_schema": city, "parameters": {"properties": {}}}, {"parameters": nested}):
        with pytest.raises(UserError, match="the chat template leaves out 'city' of tools"):
            lines(**schema)


def test_the_margin_of_openai_s_format_is_used() -> None:
    answer = [{"role": "assistant", "content": "Yo"}]
    values = {"input": {"messages": TURNS[:1]}, "preferred_output": answer, "non_preferred_output": answer}
    kind = pair_kind(classifies=True)
    [with_it, without] = kind.items(
        DataRecord({**values, **margin}, Path("data.jsonl"), "line 1") for margin in ({"margin": 2.5}, {})
    )
    assert kind.values(np.array([with_it.mark, without.mark], np.uint32))["margins"].tolist() == [2.5, 0.0]


def test_questions_and_answers_as_texts_say_how_to_make_them_turns(tmp_path: Path) -> None:
    rows = [{"question": "Capital of France?", "answer": "Paris"}, {"question": "<|turn|>Hi", "answer": "Yo"}]
    file = write_records(tmp_path / "data.csv", rows)
    said = [
        [line for line in described(file, tmp_path, template, **columns) if "turns" in line]
        for template, columns in (
            (PLAIN_TEMPLATE, {"prompt": "question", "completion": "answer"}),
            (None, {"prompt": "question", "completion": "answer"}),
            (PLAIN_TEMPLATE, {"instruction": "question", "output": "answer"}),
        )
    ]
    [told], nothing, [turns] = said
    assert (
        told.startswith("prompts: 1 record")
        and "(--columns instruction=question output=answer: turns" in told
    )
    assert not nothing and turns.startswith("instructions: 2 records")


def test_what_a_template_leaves_out_of_turns_and_tools_is_named(
    jsonl: Callable[..., str], tmp_path: Path
) -> None:
    inner = {"type": "object", "properties": {"lat": {"type": "number", "description": "In degrees"}}}
    parameters = {"type": "object", "properties": {"at": {**inner, "description": "A place"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "Looks", "parameters": parameters}}
    record = {
        "messages": [{**TURNS[0], "name": "Ann"}, {"role": "assistant", "content": "Yo"}],
        "tools": [tool],
    }
    shown = (
        "{% for t in tools %}{{ t.function.name }}{{ t.function.description }}{{ t.function.parameters.properties }}"
        "{% endfor %}"
    )
    shallow = shown.replace(
        "{{ t.function.parameters.properties }}",
        "{% for name, p in t.function.parameters.properties.items() %}{{ name }}{{ p.description }}"
        "{{ p.properties.keys() | list }}{% endfor %}",
    )
    named = PLAIN_TEMPLATE.replace("{{ m['role'] }}", "{{ m['role'] }}{{ m['name'] }}")
    file = jsonl(record)
    both = "not read: 'name' of turns (1), 'description' of tools' parameters (1)"
    assert both in described(file, tmp_path, shallow + PLAIN_TEMPLATE)
    assert both.replace("'name' of turns (1), ", "") in described(file, tmp_path, shallow + named)
    assert not any("not read" in line for line in described(file, tmp_path, shown + named))
