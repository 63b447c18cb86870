"""Every command and program in README and docs runs, on small data; those that cannot, say why on the page."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cli.options.command import parse_command_line
from common.data.demo_text import train_demo_tokenizer
from tests.helpers.doc_blocks import ROOT, Block, blocks_of, run_command

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
INLINE = re.compile(r"(?<!`)`(finetune --[^`]+|python scripts/[^`]+)`(?!`)", re.DOTALL)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory with what the pages speak of: small, and of the same names."""
    home = tmp_path_factory.mktemp("home")
    checkpoint = home / "Llama-3-8B"
    config = LlamaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(checkpoint)
    train_demo_tokenizer(384, checkpoint)
    return home


@pytest.fixture(scope="module")
def places(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A working directory for each page, which its blocks share as they do on a reader's machine."""
    folders = {}
    for page in PAGES:
        place = tmp_path_factory.mktemp(page.stem)
        (place / "chats.jsonl").write_text('{"text": "One line of a chat."}\n' * 40)
        (place / "mnt" / "nvme0").mkdir(parents=True)
        shutil.copytree(home / "Llama-3-8B", place / "finetune-output" / "demo" / "checkpoint")
        (place / "facts.jsonl").write_text('{"prompt": "One and one are", "completion": " two."}\n' * 8)
        folders[page.name] = place
    return folders


@pytest.fixture
def place(
    request: pytest.FixtureRequest, places: dict[str, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    block: Block = request.getfixturevalue("block")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("FINETUNE_CACHE", str(home / "cache"))
    monkeypatch.chdir(places[block.page])
    return places[block.page]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language or block.commands], ids=str)
@pytest.mark.slow
def test_a_block_runs(block: Block, place: Path) -> None:
    if block.reason is not None:
        pytest.skip(block.reason)
    if block.file is not None:
        (place / block.file).write_text(block.text)
    elif block.language == "python":
        exec(compile(block.text, str(block), "exec"), _names(place))
    else:
        assert block.commands, "a block of another language says what it is: <!-- file: NAME -->"
        for command in block.commands:
            run_command(command, place / "mnt")


def _names(place: Path, known: dict[Path, dict[str, object]] = {}) -> dict[str, object]:  # noqa: B006
    """The variables that programs of one page share."""
    return known.setdefault(place, {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_could_be_typed(page: Path) -> None:
    """Options and values are right, and scripts exist. (Running them all would take hours: many measure.)"""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for command in INLINE.findall(text):
        words = command.split()
        if words[0] == "python":
            assert (ROOT / words[1]).exists(), command
            continue
        complete = [
            "--ssd=x" if word == "--ssd" else word for word in words[1:] if word not in ("...", "DIR...")
        ]
        if complete[-1].isupper() or {"--config", "--help", "--version"} & set(complete):
            continue  # a placeholder, or a file of the reader's
        try:
            parse_command_line(complete)
        except click.BadOptionUsage:  # named without a value
            assert complete[-1].startswith("--"), command


def test_reasons_are_few() -> None:
    """What is not run is the exception."""
    skipped = [block for block in BLOCKS if block.reason is not None]
    assert len(skipped) <= 12, [str(block) for block in skipped]
    assert sum(bool(block.commands) and block.reason is None for block in BLOCKS) >= 8
