"""Chat with a saved model in memory, through transformers: lines from standard input, answers as they are generated."""

import sys
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from cli.options.settings import Settings
from common.activity import activity
from common.errors import UserError
from common.hardware.machine import memory_available_bytes
from common.models.presets import load_config
from common.units import format_bytes

MOST_TOKENS = 1024


def run_chat(settings: Settings) -> None:
    """Answer each line of standard input, knowing the lines and answers before it, until the input ends."""
    _, checkpoint = load_config(settings.model)
    if checkpoint is None:
        raise UserError(f"{settings.model} is a preset of random weights: give --model a checkpoint.")
    adapter = None if settings.adapter is None else settings.adapter.expanduser()
    with activity(f"loading {settings.model}", announced=True):
        tokenizer, model = _tokenizer(checkpoint, adapter), _model(checkpoint, adapter)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    messages: list[dict[str, str]] = []
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    print("Type a line; end with Ctrl-D.", file=sys.stderr, flush=True)
    for line in filter(None, map(str.strip, sys.stdin)):
        messages.append({"role": "user", "content": line})
        text: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        ids = torch.tensor([text["input_ids"]], device=model.device)
        room = context - ids.shape[1]
        if room < 1:
            raise UserError(
                f"The conversation has {ids.shape[1]} tokens, and the model's context {context}: start another."
            )
        limit = min(MOST_TOKENS, room)
        tokens = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer, max_new_tokens=limit
        )[0, ids.shape[1] :]
        if len(tokens) == limit and int(tokens[-1]) not in ends:
            why = f"the model's context of {context} tokens is full" if limit == room else f"cut after {limit} tokens"
            print(f"({why})", file=sys.stderr, flush=True)
        messages.append({"role": "assistant", "content": str(tokenizer.decode(tokens, skip_special_tokens=True))})


def _tokenizer(checkpoint: Path, adapter: Path | None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    template = (adapter or checkpoint) / "chat_template.jinja"  # a run writes its own next to adapters
    if template.is_file():
        tokenizer.chat_template = template.read_text()
    if tokenizer.chat_template is None:
        raise UserError(f"{checkpoint} has no chat template: train with --chat-template NAME, which saves one.")
    return tokenizer


def _model(checkpoint: Path, adapter: Path | None) -> Any:
    need = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    on_gpu = torch.cuda.is_available() and need < torch.cuda.mem_get_info()[0]
    if not on_gpu and need > memory_available_bytes():
        raise UserError(
            f"{checkpoint} takes {format_bytes(need)}, and {format_bytes(memory_available_bytes())} of memory are "
            "free: chat needs all of it in memory."
        )
    device = "cuda" if on_gpu else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", local_files_only=True)
    model = model.to(device)
    return (model if adapter is None else peft.PeftModel.from_pretrained(model, str(adapter))).eval()
