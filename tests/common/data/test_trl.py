"""Every chat template that TRL ships, with conversations of all kinds: all texts are there, and only answers have loss.

Where TRL takes the record as it is, ids and loss are those of TRL's own tokenization.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.encode import EncodedSegment, Encoder
from common.data.examples import examples_of_records, pairs_of_records
from common.data.read import DataRecord
from common.errors import UserError
from tests.common.data.templates import TRL, make_tokenizer

pytest.importorskip("trl")
TEMPLATES, TOKENIZER = TRL, make_tokenizer(TRL.values())
ENCODERS: dict[str, Encoder] = {}


def encoder(name: str) -> Encoder:
    TOKENIZER.chat_template = TEMPLATES[name]
    return ENCODERS.setdefault(name, Encoder(TOKENIZER))


def encode(name: str, record: dict[str, Any]) -> list[EncodedSegment]:
    return list(encoder(name).encode(examples_of_records([DataRecord(record, Path("data.jsonl"), "line 1")])))


def encoded_or_refused(name: str, record: dict[str, Any]) -> tuple[list[EncodedSegment], str]:
    try:
        return encode(name, record), ""
    except UserError as error:
        return [], str(error)


def trained_text(document: EncodedSegment) -> str:
    return str(TOKENIZER.decode(document.ids[document.trained].tolist()))


def tagged(texts: Iterator[str], kind: str, number: int) -> str:
    """A text that nothing else holds: behind letters of any kind, what it is and a number."""
    return f"{next(texts)}{kind}{number}."


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
TURNS = st.lists(st.sampled_from(["ask", "answer", "think", "call", "parts", "two"]), min_size=1, max_size=4)
START = st.sampled_from(["", "system", "developer", "answer"])


def conversation(start: str, turns: list[str], texts: Iterator[str]) -> list[dict[str, Any]]:
    """Messages: an opening, then questions that are answered in several ways."""
    messages: list[dict[str, Any]] = []

    def say(role: str, kind: str, **more: Any) -> None:
        messages.append({"role": role, "content": tagged(texts, kind, len(messages)), **more})

    if start:
        say("assistant" if start == "answer" else start, "ANSWER" if start == "answer" else "OTHER")
    for turn in turns:
        say("user", "OTHER")
        if turn == "ask":
            continue
        if turn == "call":
            arguments: dict[str, Any] = {"city": tagged(texts, "ANSWER", 100 + len(messages))}
            function = {"name": "weather", "arguments": arguments}
            messages.append(
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": function}],
                }
            )
            say("tool", "OTHER")
        if turn == "think":
            say("assistant", "ANSWER", reasoning_content=tagged(texts, "ANSWER", 200 + len(messages)))
        else:
            say("assistant", "ANSWER")
        if turn == "two":
            say("assistant", "ANSWER")
        if turn == "parts":
            for message in messages:
                if isinstance(message["content"], str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
    return messages


def check(documents: list[EncodedSegment], messages: list[dict[str, Any]], prompt: int = 0) -> None:
    """Every text is there, each answer carries loss once, and nothing else does."""
    tag = re.compile(r"(?:ANSWER|OTHER)\d+\.")
    texts = [set(tag.findall(json.dumps(message, ensure_ascii=False))) for message in messages]
    whole = "".join(str(TOKENIZER.decode(document.ids.tolist())) for document in documents)
    assert "'text'" not in whole and '"text"' not in whole, "parts are written as texts"
    seen = tag.findall(whole)
    carrying = [word for document in documents for word in tag.findall(trained_text(document))]
    answers = {word for text in texts[prompt:] for word in text if word.startswith("ANSWER")}
    assert sorted(carrying) == sorted(answers)
    # Behind the last answer nothing is learned, and before it what was thought may be gone again.
    last = max(place for place, text in enumerate(texts) if text & answers)
    needed = {word for text in texts[: last + 1] for word in text}
    hidden = {word for word in needed - answers if re.match(r"ANSWER2\d\d", word)}
    assert needed - hidden <= set(seen)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@settings(max_examples=8, deadline=None, derandomize=True)
@given(start=START, turns=TURNS, texts=st.lists(TEXT, min_size=40, max_size=40), is_prompt=st.booleans())
def test_every_text_is_there_and_only_answers_carry_loss(
    name: str, start: str, turns: list[str], texts: list[str], is_prompt: bool
) -> None:
    messages = conversation(start, turns, iter(texts))
    if not any(message["role"] == "assistant" for message in messages):
        return
    last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    record = (
        {"prompt": messages[:last], "completion": messages[last:]} if is_prompt else {"messages": messages}
    )
    documents, refusal = encoded_or_refused(name, record)
    if refusal:
        assert re.search("data.jsonl, line 1.*(leaves out|refuses)", refusal), refusal
    else:
        check(documents, messages, last if is_prompt else 0)


PLAIN = [
    {"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"}, {"role": "assistant", "content": "Rome."},
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_prompts_and_pairs_are_tokenized_as_by_trl(name: str) -> None:
    """As its trainers do: ids are the whole's, and the completion is what is not shared with the prompt."""
    from trl.data_utils import _tokenize, common_prefix_length

    encode_with = encoder(name)
    for prompt, completion in ((PLAIN[:1], PLAIN[1:2]), (PLAIN[:3], PLAIN[3:])):
        if name.startswith(
            ("smolvlm", "idefics3", "llava")
        ):  # these take parts, and TRL gives them as they are
            prompt, completion = ([{**one, "content": [{"type": "text", "text": one["content"]}]} for one in some]
                                  for some in (prompt, completion))  # fmt: skip
        asked = _tokenize(TOKENIZER, prompt, add_generation_prompt=True)["input_ids"]
        whole = _tokenize(TOKENIZER, prompt + completion)["input_ids"]
        start = common_prefix_length(asked, whole)
        if name == "glm4moe":  # an answer ends with the mark of the next turn, which TRL adds for SFT alone
            whole = [*whole, TOKENIZER.convert_tokens_to_ids("<|user|>")]
        expected = whole, [place >= start for place in range(len(whole))]
        [document] = encode(name, {"prompt": prompt, "completion": completion})
        assert (document.ids.tolist(), document.trained.tolist()) == expected
        record = {"prompt": prompt, "chosen": completion, "rejected": completion}
        [item] = pairs_of_records([DataRecord(record, Path("data.jsonl"), "line 1")])
        for [document] in (encode_with.encode([example]) for example in item.examples):
            assert (document.ids.tolist(), document.trained.tolist()) == expected


@pytest.mark.parametrize("name", sorted(name for name in TEMPLATES if name.endswith("_training")))
def test_conversations_have_the_marks_of_trls_training_templates(name: str) -> None:
    from trl.data_utils import _tokenize

    encoder(name)
    as_is = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in PLAIN]
    messages = as_is if name.startswith(("smolvlm", "idefics3", "llava")) else PLAIN
    out = _tokenize(TOKENIZER, messages, return_assistant_tokens_mask=True)
    [document] = encode(name, {"messages": PLAIN})
    assert document.ids.tolist() == list(out["input_ids"])
    assert document.trained.tolist() == [bool(mark) for mark in out["assistant_masks"]]
