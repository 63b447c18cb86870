"""Records of any layout and any content: all their texts are there, only answers carry loss, or the line is refused."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.encode import Encoder, RowFitter
from common.data.examples import classes_of_records, examples_of_records, labels_of_records, pairs_of_records
from common.data.read import DataRecord
from common.errors import UserError
from tests.common.data.conftest import PLAIN_TEMPLATE, make_tokenizer

# As PLAIN_TEMPLATE, and what assistants call and which tools there are.
TEMPLATE = PLAIN_TEMPLATE.replace(
    "{{ m['content'] }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
)
TEMPLATE = TEMPLATE.replace("{% for", "{{ tools | tojson if tools }}{% for", 1)
TOKENIZER = make_tokenizer(TEMPLATE)
TAG = re.compile(r"(?:ANSWER|OTHER|BAD)\d+\.")
Turn = tuple[str, str]


def texts_of(examples: Any) -> list[tuple[list[str], list[str]]]:
    """The tags that each document shows, and those that carry loss."""
    documents = Encoder(TOKENIZER, is_alone=True).encode(examples)
    return [
        (TAG.findall(TOKENIZER.decode(each.ids)), TAG.findall(TOKENIZER.decode(each.ids[each.trained])))  # type: ignore[arg-type]
        for each in documents
    ]


@st.composite
def spelled(draw: Any, turns: list[Turn]) -> Any:
    """Turns as one of many tools writes them."""
    sharegpt, parts, as_text = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    names = {"user": "human", "assistant": "gpt"} if sharegpt else {}
    role, content = ("from", "value") if sharegpt else ("role", "content")
    written = [
        {role: names.get(who, who), content: [{"type": "text", "text": text}] if parts else text}
        for who, text in turns
    ]
    return json.dumps(written) if as_text else written


@st.composite
def records(draw: Any) -> tuple[dict[str, Any], set[str], set[str]]:
    """A record, all texts of its documents, and those of its answers; of pairs, those of the preferred one."""
    numbers = itertools.count()

    def tag(kind: str) -> str:
        return f"{draw(st.sampled_from(['', 'é ', '{}', chr(10)]))}{kind}{next(numbers)}."

    turns: list[Turn] = []
    for _ in range(draw(st.integers(0, 2))):
        turns += [("user", tag("OTHER")), ("assistant", tag("ANSWER"))]
    last, answer = ("user", tag("OTHER")), tag("ANSWER")
    record: dict[str, Any] = {"id": 7, "source": "web"}
    layout = draw(
        st.sampled_from(["messages", "conversations", "prompt", "instruction", "pair", "whole pair"])
    )
    trained = {answer}
    if draw(st.booleans()):
        record["system"] = tag("OTHER")
    if layout in ("messages", "conversations"):
        record[layout] = draw(spelled([*turns, last, ("assistant", answer)]))
        trained |= {text for who, text in turns if who == "assistant"}
    elif layout == "prompt":
        repeated = draw(st.booleans())  # the completion is the whole conversation
        asked = [*turns, last]
        record["prompt"] = (
            last[1] if not turns and draw(st.booleans()) else json.loads(json.dumps(_plain(asked)))
        )
        record["completion"] = _plain([*(asked if repeated else []), ("assistant", answer)])
        record["completion"] = answer if not repeated and draw(st.booleans()) else record["completion"]
    elif layout == "instruction":
        record |= {
            "instruction": last[1],
            "input": tag("OTHER") if draw(st.booleans()) else "",
            "output": answer,
        }
        record["history"] = [[turns[at][1], turns[at + 1][1]] for at in range(0, len(turns), 2)]
        trained |= {text for who, text in turns if who == "assistant"}
    else:
        asked = [*turns, last]
        beginning = asked if layout == "whole pair" else []
        record["chosen"] = _plain([*beginning, ("assistant", answer)])
        record["rejected"] = _plain([*beginning, ("assistant", tag("BAD"))])
        if not beginning or draw(st.booleans()):
            record["prompt"] = _plain(asked) if turns or draw(st.booleans()) else last[1]
    everything = set(TAG.findall(json.dumps(record, ensure_ascii=False)))
    return record, everything, {TAG.findall(text)[0] for text in trained}


def _plain(turns: list[Turn]) -> list[dict[str, str]]:
    return [{"role": who, "content": text} for who, text in turns]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(records())
def test_every_text_of_a_record_is_there_once_and_only_answers_carry_loss(drawn: Any) -> None:
    record, everything, answers = drawn
    read = [DataRecord(record, Path("data.jsonl"), "line 1")]
    if "chosen" not in record:
        [(shown, trained)] = texts_of(examples_of_records(read))
        assert (sorted(shown), sorted(trained)) == (sorted(everything), sorted(answers))
        return
    [item] = pairs_of_records(read)
    better, worse = texts_of(item.examples)
    [bad] = [text for text in everything if text.startswith("BAD")]
    assert (sorted(better[0]), better[1]) == (sorted(everything - {bad}), list(answers))
    assert (sorted(worse[0]), worse[1]) == (sorted(everything - answers), [bad])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(records(), st.integers(2, 200), st.booleans())
def test_what_a_row_does_not_take_is_cut_at_its_end_or_left_out_and_counted(
    drawn: Any, seq_len: int, truncate: bool
) -> None:
    record, *_ = drawn
    if "chosen" in record:
        return
    examples = [DataRecord(record, Path("data.jsonl"), "line 1")]
    [whole] = Encoder(TOKENIZER).encode(examples_of_records(examples))
    encoder = Encoder(TOKENIZER, RowFitter(seq_len, truncate))
    parts, counts = list(encoder.encode(examples_of_records(examples))), encoder.fitting
    length = sum(len(part.ids) for part in parts)
    assert length <= seq_len
    for part in parts:
        assert part.ids.tolist() == whole.ids[:length].tolist()
        assert part.trained.tolist() == whole.trained[:length].tolist() and part.trained[1:].any()
    lost = len(whole.ids) - length
    assert (counts.cut.tokens, counts.left_out.tokens) == ((lost, 0) if parts else (0, lost))
    assert (counts.cut.records, counts.left_out.records) == (int(bool(parts) and lost > 0), int(not parts))
    assert not parts or truncate or not lost


WRITTEN = st.sampled_from(
    ["", " ", "\n", " a", "a ", "\ta\n\n", "\0", "1e3", "NaN", "</s>", "a</s>\n", "<s>a</s>",
     "<|turn|>assistant\nx", "{{ x }}", "{% raw %}", '{"a": 1}', "[]", "\u2028\x85", "\ufeffa", "a\r\nb\rc",
     "e\u0301\xe9", "<image>", "user", "qz1zq", "a" * 3000]
) | st.text(st.characters(codec="utf-8"), max_size=8)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(WRITTEN, WRITTEN, WRITTEN)
def test_texts_of_any_content_are_rendered_as_they_are_written(system: str, asked: str, answer: str) -> None:
    turns = [("user", asked), ("assistant", answer)]
    whole = [("system", system), *turns] if system.strip() else turns
    sharegpt = [{"from": {"user": "human", "assistant": "gpt"}[who], "value": text} for who, text in turns]
    for record in (
        {"messages": _plain(turns)},
        {"conversations": sharegpt},
        {"messages": json.dumps(_plain(turns))},
        {"messages": [{"role": who, "content": [{"type": "text", "text": text}]} for who, text in turns]},
        {"prompt": _plain(turns[:1]), "completion": _plain(turns[1:])},
        {"instruction": asked, "output": answer},
        {"instruction": "", "input": asked, "output": answer},
    ):
        line = json.loads(json.dumps({**record, "system": system, "n": 1}))
        encoder = Encoder(TOKENIZER)
        documents = list(
            encoder.encode(examples_of_records([DataRecord(line, Path("data.jsonl"), "line 1")]))
        )
        if not answer.strip():
            assert (documents, encoder.fitting.empty.records) == ([], 1)
            continue
        written = TOKENIZER.apply_chat_template(_plain(whole), return_dict=True)["input_ids"]
        prompt = TOKENIZER.apply_chat_template(
            _plain(whole[:-1]), return_dict=True, add_generation_prompt=True
        )
        assert [document.ids.tolist() for document in documents] == [written]
        assert documents[0].trained.tolist() == [at >= len(prompt["input_ids"]) for at in range(len(written))]


JUNK = st.sampled_from(
    [None, 0, 1, 2.5, True, "", " ", "a", "{", '{"a": 1, "a": 2}', "[]", "[1]", [], {}, [[]], [None]]
)
KEYS = st.sampled_from(
    ["role", "content", "from", "value", "tool_calls", "function_call", "weight", "thinking", "name"]
)
ROLE = st.sampled_from(["user", "assistant", "gpt", "human", "system", "tool", "function_call", "", 3, None])
PART = st.dictionaries(
    st.sampled_from(["type", "text", "value", "image"]), JUNK | st.sampled_from(["text", "image"])
)
CALL = st.dictionaries(st.sampled_from(["type", "function", "name", "arguments"]), JUNK)
CALLS = JUNK | st.lists(CALL | st.builds(lambda call: {"function": call}, CALL), max_size=2)
TURN = st.builds(
    lambda junk, good: {**junk, **good},
    st.dictionaries(KEYS, JUNK | CALLS, max_size=2),
    st.fixed_dictionaries({}, optional={"role": ROLE, "content": JUNK | st.lists(PART | JUNK, max_size=2)}),
)
COLUMNS = st.sampled_from(
    ["messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text", "chosen",
     "rejected", "label", "margin", "system", "history", "tools", "functions", "documents",
     "chat_template_kwargs", "images", "context", "preferred_output", "non_preferred_output"]
)  # fmt: skip
VALUES = JUNK | st.lists(TURN, max_size=3) | TURN | st.lists(CALL, max_size=2)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(COLUMNS, VALUES, min_size=1, max_size=5))
def test_a_record_of_any_content_is_taken_or_its_line_is_rejected(record: dict[str, Any]) -> None:
    encoder, read = Encoder(TOKENIZER, is_alone=True), [DataRecord(record, Path("data.jsonl"), "line 1")]
    kinds = (
        lambda: list(encoder.encode(examples_of_records(read))),
        lambda: [list(encoder.encode(item.examples)) for item in pairs_of_records(read)],
        lambda: list(classes_of_records(read, {"1": 0})),
        lambda: labels_of_records(read * 2),
    )
    for taken in kinds:
        message = ""
        try:
            taken()
        except UserError as error:
            message = str(error)
        assert not message or "data.jsonl, line 1" in message or "at least two classes" in message
