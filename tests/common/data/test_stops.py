"""The token that ends an answer is written, carries loss, and is in the generation configuration: for every template.

Those that TRL ships, ours, and templates of the structure that other published models have, which are written here.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig

from common.data.encode import Encoder, RowFitter
from common.data.examples import examples_of_records
from common.data.read import DataRecord
from common.errors import UserError
from common.files import preset_files
from common.models.generation import FILE, generation_config_of, stops_of, write_stops
from tests.common.data.templates import TRL, make_tokenizer, tool_conversation

_USER = "{% if m['role'] == 'user' %}"
_EACH, _END = "{% for m in messages %}", "{% endif %}{% endfor %}"


def _turns(user: str, answer: str, prompt: str, start: str = "") -> str:
    text = f"{start}{_EACH}{_USER}{user}{{% else %}}{prompt}{answer}{_END}"
    return f"{text}{{% if add_generation_prompt %}}{prompt}{{% endif %}}".replace(
        "TEXT", "{{ m['content'] }}"
    )


# Templates written with the marks of published models, with the token at which each of these stops.
OTHERS = {
    "llama-2": (_turns("<s>[INST] TEXT [/INST]", " TEXT </s>", ""), "</s>"),
    "vicuna": (_turns("USER: TEXT ", "TEXT</s>", "ASSISTANT: ", "{{ bos_token }}"), "</s>"),
    "olmo-2": (
        _turns("<|user|>\nTEXT\n", "TEXT<|endoftext|>{% if not loop.last %}\n{% endif %}", "<|assistant|>\n"),
        "<|endoftext|>",
    ),
    "granite": (
        _turns(
            "<|start_of_role|>user<|end_of_role|>TEXT<|end_of_text|>\n",
            "TEXT<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        "<|end_of_text|>",
    ),
    "phi-4": (
        _turns(
            "<|im_start|>user<|im_sep|>TEXT<|im_end|>", "TEXT<|im_end|>", "<|im_start|>assistant<|im_sep|>"
        ),
        "<|im_end|>",
    ),
    "kimi-k2": (
        _turns(
            "<|im_user|>user<|im_middle|>TEXT<|im_end|>",
            "TEXT<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        "<|im_end|>",
    ),
    "minimax-m2": (_turns("]~b]user\nTEXT[e~[\n", "TEXT[e~[\n", "]~b]ai\n", "]~!b["), "[e~["),
    "exaone": (_turns("[|user|]TEXT\n", "TEXT[|endofturn|]\n", "[|assistant|]"), "[|endofturn|]"),
    "seed-oss": (
        _turns("<seed:bos>user\nTEXT<seed:eos>", "TEXT<seed:eos>", "<seed:bos>assistant\n"),
        "<seed:eos>",
    ),
    # The next turn begins with the token that ends an answer.
    "glm-4": (_turns("<|user|>\nTEXT", "TEXT", "<|assistant|>\n", "[gMASK]<sop>"), "<|user|>"),
    # The prompt for an answer ends all conversations, unasked (Llama 3 of April 2024).
    "llama-3 unasked": (
        f"{_EACH}<|start_header_id|>{{{{ m['role'] }}}}<|end_header_id|>\n\n{{{{ m['content'] }}}}<|eot_id|>"
        "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
        "<|eot_id|>",
    ),
    "chatml unasked": (
        f"{_EACH}<|im_start|>{{{{ m['role'] }}}}\n{{{{ m['content'] }}}}<|im_end|>\n"
        "{% endfor %}{{ '<|im_start|>assistant\n' }}",
        "<|im_end|>",
    ),
    # What the template marks as the assistant's leaves the end out.
    "marks without the end": (
        _turns(
            "<|im_start|>user\nTEXT<|im_end|>\n",
            "{% generation %}TEXT{% endgeneration %}<|im_end|>\n",
            "<|im_start|>assistant\n",
        ),
        "<|im_end|>",
    ),
}
TEMPLATES = {
    **{f"trl {name}": text for name, text in TRL.items()},
    **{name: file.read_text() for name, file in preset_files("chat_templates", ".jinja").items()},
    **{name: text for name, (text, _) in OTHERS.items()},
}
PLAIN = [
    {"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"}, {"role": "assistant", "content": "Rome."},
]  # fmt: skip
# Tokens with which published models call tools and end their answers, where they are not those of a plain answer.
CALL_STOPS = {"glm4moe": "<|observation|>", "gptoss": "<|call|>", "diffusion_gemma": "<|tool_response>"}
# What TRL marks of an answer before others ends with another token than that of the last answer.
OTHER_EARLIER_ENDS = ("trl gptoss_training", "trl phi3_training", "trl phi3_5_training")
TOKENIZER = make_tokenizer(TEMPLATES.values())


def encoded(template: str, record: dict[str, Any]) -> tuple[list[list[str]], RowFitter]:
    """Return the end of each trained run of tokens, and the counts."""
    TOKENIZER.chat_template = template
    fitter, runs = RowFitter(), list[list[str]]()
    example = examples_of_records([DataRecord(record, Path("data.jsonl"), "line 1")])
    for document in Encoder(TOKENIZER, fitter).encode(example):
        words = TOKENIZER.convert_ids_to_tokens(document.ids.tolist())
        trained = [*document.trained.tolist(), False]
        ends = [at for at in range(1, len(trained)) if trained[at - 1] and not trained[at]]
        runs += [[word for word in words[:end] if word not in ("Ċ", "Ġ")] for end in ends]
    return runs, fitter


@pytest.mark.parametrize("calls", [False, True], ids=["plain", "calls"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_end_with_a_token_that_carries_loss_and_stops_generation(
    name: str, calls: bool, tmp_path: Path
) -> None:
    try:
        runs, fitter = encoded(
            TEMPLATES[name], tool_conversation({"city": "Rome"}) if calls else {"messages": PLAIN}
        )
    except UserError:
        if calls:  # many know no tools
            return
        raise
    stops = TOKENIZER.convert_ids_to_tokens(fitter.stops)
    assert len(runs) == 2 and not fitter.endless.records
    for run in runs[-1:] if name in OTHER_EARLIER_ENDS and not calls else runs:
        assert run[-1] in stops, (run[-4:], stops)
    if name in OTHERS:
        assert stops == [OTHERS[name][1]]
    family = name.removeprefix("trl ").removesuffix("_training")
    if calls and family in CALL_STOPS:
        assert CALL_STOPS[family] in stops
    write_stops(tmp_path, GenerationConfig(eos_token_id=TOKENIZER.eos_token_id), fitter.stops)
    written = GenerationConfig.from_pretrained(tmp_path)
    assert {TOKENIZER.eos_token_id, *fitter.stops} == set(stops_of(written))


@pytest.mark.parametrize("template", [
    OTHERS["llama-3 unasked"][0], OTHERS["chatml unasked"][0],
    f"{_EACH}### {{{{ m['role'] }}}}:\n{{{{ m['content'] }}}}</s>\n\n{{% endfor %}}{{{{ '### assistant:\n' }}}}",
])  # fmt: skip
def test_an_unasked_prompt_carries_no_loss(template: str) -> None:
    prompt, runs = template.rpartition("{{ '")[2].partition("' }}")[0], ids_of(template, {"messages": PLAIN})
    asked = template.replace(
        f"{{{{ '{prompt}' }}}}", f"{{% if add_generation_prompt %}}{prompt}{{{{ '' }}}}{{% endif %}}"
    )
    assert asked != template and runs == ids_of(asked, {"messages": PLAIN})
    # What all turns end with is none.
    plain = f"{_EACH}{{{{ m['content'] }}}}</s>{{% endfor %}}"
    assert TOKENIZER.decode(ids_of(plain, {"messages": PLAIN})[0]).endswith("Rome.</s>")


@pytest.mark.parametrize("end", [None, 2, [2, 7]])
def test_stops_are_added_to_those_that_are_there(end: Any, tmp_path: Path) -> None:
    config = LlamaConfig(eos_token_id=2)
    config.name_or_path = str(tmp_path)
    (tmp_path / FILE).write_text(json.dumps({"eos_token_id": end, "temperature": 0.6, "do_sample": False}))
    write_stops(tmp_path, generation_config_of(config), [5, 2])
    written = json.loads((tmp_path / FILE).read_text())
    before = end if isinstance(end, list) else [end] * (end is not None)
    assert written["eos_token_id"] == list(dict.fromkeys([*before, 5, 2]))
    assert written["temperature"] == 0.6
    assert stops_of(generation_config_of(LlamaConfig(eos_token_id=3))) == [3]


@pytest.mark.parametrize("name", sorted(name for name in TRL if not name.endswith("_training")))
def test_two_spellings_of_arguments_and_content_render_alike(name: str) -> None:
    arguments = {"city": "Rome", "days": 3, "near": {"sea": True}}
    record = tool_conversation(arguments)
    try:
        expected = ids_of(TRL[name], record)
    except UserError:  # it knows no tools
        record = expected = {}
    if expected:
        assert ids_of(TRL[name], tool_conversation(json.dumps(arguments))) == expected
        assert '{{"city"' not in str(TOKENIZER.decode(expected[0]))
    for messages in [PLAIN, *([record["messages"]] if record else [])]:
        parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
        given = record if messages is not PLAIN else {}
        assert ids_of(TRL[name], {**given, "messages": parts}) == ids_of(
            TRL[name], {**given, "messages": messages}
        )


@pytest.mark.parametrize("name", sorted(name for name in TRL if not name.endswith("_training")))
def test_calls_in_separate_turns_render_as_calls_of_the_answer(name: str) -> None:
    """ms-swift's form, which it makes of OpenAI's, and of several calls at once."""
    record = tool_conversation({"city": "Rome"})
    asked, answer, *rest = record["messages"]
    calls = answer["tool_calls"] * 2
    turns = [{"role": "tool_call", "content": call["function"]} for call in calls]
    bare = [{"type": "function", "function": call["function"]} for call in calls]
    for text in ("", "I look."):
        before = [{"role": "assistant", "content": text}] if text else []
        whole = {"role": "assistant", "content": text, "tool_calls": bare}
        try:
            expected = ids_of(TRL[name], {**record, "messages": [asked, whole, *rest]})
        except UserError:  # it knows no tools, or no text next to a call
            continue
        assert ids_of(TRL[name], {**record, "messages": [asked, *before, *turns, *rest]}) == expected


def ids_of(template: str, record: dict[str, Any]) -> list[list[int]]:
    """Return the token ids of a record's documents."""
    TOKENIZER.chat_template = template
    example = examples_of_records([DataRecord(record, Path("data.jsonl"), "line 1")])
    return [document.ids.tolist() for document in Encoder(TOKENIZER).encode(example)]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'\xef\xbb\xbf{"eos_token_id": 5}', b"\0" * 20, b"[]", b"\xff"]
)
def test_a_generation_configuration_that_cannot_be_read_is_refused(content: bytes, tmp_path: Path) -> None:
    """Without a word, what config.json implies would stop at other tokens."""
    config = LlamaConfig(eos_token_id=2)
    assert generation_config_of(config, tmp_path).eos_token_id == 2
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UserError, match=f"{FILE} is not a generation configuration"):
        generation_config_of(config, tmp_path)
