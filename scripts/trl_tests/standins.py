"""Stand-ins for what TRL's tests load from the Hugging Face Hub: TRL's own generating scripts run, and nothing is sent.

TRL has a program for each of its tiny models and data sets (``scripts/`` of its repository), which upload what they
make. Here they write to a folder that is laid out as the Hub's cache, so that ``from_pretrained`` finds it without a
network. Only tokenizers are others than the Hub's: one small vocabulary, with TRL's own chat template of the family.
"""

import contextlib
import importlib
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

ORGANIZATION = "trl-internal-testing"
REVISION = "0" * 40
VOCABULARY = 1024
TEMPLATES = {
    "CohereLabs/aya": "cohere", "CohereLabs/tiny-aya": "cohere2", "deepseek-ai/DeepSeek-R1": "deepseekv3",
    "google/gemma-": "gemma", "zai-org/GLM-4.5": "glm4moe", "openai/gpt-oss": "gptoss", "LiquidAI/LFM2-": "lfm2",
    "LiquidAI/LFM2.5": "lfm2_2_5", "meta-llama/Meta-Llama-3-": "llama3", "meta-llama/Llama-3.1": "llama3_1",
    "meta-llama/Llama-3.2": "llama3_2", "nvidia/NVIDIA-Nemotron-3-Nano": "nemotron_3_nano", "microsoft/Phi-3-": "phi3",
    "microsoft/Phi-3.5": "phi3_5", "Qwen/Qwen2.5": "qwen2_5", "Qwen/Qwen3-": "qwen3",
    "Qwen/Qwen3-4B-Instruct-2507": "qwen3_instruct_2507",
}  # fmt: skip
"""TRL's chat template of a model, by how the model's name on the Hub begins; the longest beginning counts."""
ENDS = {"qwen": "<|im_end|>", "lfm2": "<|im_end|>", "llama3": "<|eot_id|>", "gptoss": "<|return|>", "phi3": "<|end|>"}
"""Token that ends a text, by how the name of the template begins; ``</s>`` for all others."""
FAMILIES = {
    "Qwen/Qwen2.5": "qwen2", "Qwen/Qwen3-30B": "qwen3_moe", "Qwen/Qwen3-": "qwen3", "EleutherAI/": "gpt_neox",
    "meta-llama/": "llama",
}  # fmt: skip
"""Families whose configuration TRL's programs load from the Hub, by how the model's name begins."""
_SPECIAL = re.compile(r"<\|?[a-z_]+\|?>|<｜[^｜]+｜>")


def make(trl_folder: Path, hub: Path, data: Path) -> dict[str, str]:
    """Make all models and data sets that TRL has a program for.

    Args:
        trl_folder: TRL's repository.
        hub: cache of the Hub, which is filled.
        data: folder that gets the data sets, ``NAME/CONFIG``.

    Returns:
        Reasons, by the name of each program that could not run here.
    """
    sys.path.insert(0, str(trl_folder / "scripts"))
    failed: dict[str, str] = {}
    for program in sorted((trl_folder / "scripts").glob("generate_*_dataset.py")):
        _attempt(program.stem, failed, lambda name: _make_data(importlib.import_module(name), data))
    with _hub_replaced(hub):
        for kind in ("for_causal_lm", "for_sequence_classification"):
            programs = sorted((trl_folder / "scripts" / "generate_tiny_models" / kind).glob("[a-z]*.py"))
            for program in sorted(programs, key=lambda path: path.stem.startswith("peft")):  # these load another one
                _attempt(f"generate_tiny_models.{kind}.{program.stem}", failed, importlib.import_module)
    return failed


def _attempt(name: str, failed: dict[str, str], run: Any) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            run(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _make_data(program: types.ModuleType, folder: Path) -> None:
    """Run a program that uploads data sets, each ``config_name`` of which is written to ``folder`` instead."""

    def push_to_hub(made: datasets.DatasetDict, name: str, config_name: str, **_: Any) -> None:
        made.save_to_disk(folder / name / config_name)

    with mock.patch.object(datasets.DatasetDict, "push_to_hub", push_to_hub):
        name = re.search(r'default="(.+?/.+?)"', Path(str(program.__file__)).read_text())
        assert name is not None, "the program names no data set"
        program.main(0.1, True, name[1])


@contextlib.contextmanager
def _hub_replaced(hub: Path) -> Iterator[None]:
    """Let TRL's programs take tokenizers from here, and leave what they make in the cache."""
    common = importlib.import_module("generate_tiny_models._common")

    def push_to_hub(
        model: Any, tokenizer: Any, generation: Any, prefix: str | None = None, suffix: str | None = None, **_: Any
    ) -> None:
        name = "-".join(part for part in (prefix, type(model).__name__, suffix) if part)
        folder = hub / f"models--{ORGANIZATION}--{name}"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(REVISION)
        for part in (model, tokenizer, generation):
            if part is not None:
                part.save_pretrained(folder / "snapshots" / REVISION)

    def configuration(name: str, **options: Any) -> Any:
        kind: str = next(kind for start, kind in FAMILIES.items() if name.startswith(start))
        make: Any = transformers.CONFIG_MAPPING[kind]
        return make(vocab_size=len(tokenizer_of(name)), **options)

    def in_vocabulary(kind: Any) -> Any:
        tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return lambda **options: kind(**{**options, **tokens})

    names = ("Glm4MoeConfig", "Lfm2Config", "Olmo3Config", "Phi3Config")  # which name tokens of the Hub's vocabulary
    small = {name: in_vocabulary(getattr(transformers, name)) for name in names}
    nothing: dict[str, Any] = {
        name: lambda *_, **__: None
        for name in ("check_transformers_version", "smoke_test", "check_dtype_pattern", "print_config_diff")
    }
    with (
        mock.patch.multiple(common, push_to_hub=push_to_hub, **nothing),
        # The module puts another object in its place while it is imported, which a program's own import finds.
        mock.patch.multiple(sys.modules["transformers"], **small),
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", tokenizer_of),
        mock.patch.object(transformers.AutoConfig, "from_pretrained", configuration),
        mock.patch.object(GenerationConfig, "from_pretrained", return_value=GenerationConfig()),
    ):
        yield


def tokenizer_of(name: str, **_: Any) -> PreTrainedTokenizerBase:
    """Return a small tokenizer with the chat template of a model of the Hub."""
    known = [(start, template) for start, template in TEMPLATES.items() if name.startswith(start)]
    template = max(known, key=lambda one: len(one[0]))[1] if known else None
    text = "" if template is None else _template(template)
    end = next((token for start, token in ENDS.items() if (template or "").startswith(start)), "</s>")
    special = ["<pad>", "<s>", end, *sorted(set(_SPECIAL.findall(text)) - {"<pad>", "<s>", end})]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    learned.train_from_iterator(_texts(), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learned, bos_token="<s>", eos_token=end, pad_token="<pad>")
    tokenizer.chat_template = text or None
    return tokenizer


def _template(name: str) -> str:
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _texts() -> Iterator[str]:
    """Yield English text that every Python has."""
    import this  # noqa: F401 - it prints, once

    for module in (datasets, torch.nn, transformers, re, types, warnings):
        yield module.__doc__ or ""
    for name in ("Linear", "LayerNorm", "Embedding", "CrossEntropyLoss"):
        yield getattr(torch.nn, name).__doc__
