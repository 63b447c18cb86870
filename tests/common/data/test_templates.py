"""The chat templates that come with the program: what they mark as trained is what the assistant says."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.data.demo_text import train_demo_tokenizer
from common.files import preset_files

TEMPLATES = preset_files("chat_templates", ".jinja")
CHAT = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is one?"},
    {"role": "assistant", "content": "A number."}, {"role": "user", "content": "And two?"},
    {"role": "assistant", "content": "Another."},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("templates")
    train_demo_tokenizer(300, folder)
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return made


def test_there_are_those_that_the_help_names() -> None:
    assert sorted(TEMPLATES) == ["alpaca", "chatml", "gemma", "llama-3", "mistral", "zephyr"]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_answers_are_marked_and_a_prompt_is_a_beginning(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = TEMPLATES[name].read_text()
    out = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    marked = zip(out["input_ids"], out["assistant_masks"], strict=True)
    trained = tokenizer.decode([token for token, mark in marked if mark])
    for answer in ("A number.", "Another."):
        assert answer in trained
    for other in ("Be brief.", "What is one?", "And two?"):
        assert other in text and other not in trained
    prompt = tokenizer.apply_chat_template(CHAT[:-1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt) and text.removeprefix(prompt).strip().startswith("Another.")


def test_chatml_writes_tools_and_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TEMPLATES["chatml"].read_text()
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    chat = [
        {"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "warm"}, {"role": "assistant", "content": "Warm."},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    text = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
    for part in ('"name": "weather"', '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
                 "<tool_response>\nwarm\n</tool_response>"):  # fmt: skip
        assert part in text
