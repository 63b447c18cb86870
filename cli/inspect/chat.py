"""Chat with a saved model in memory, through transformers: lines from standard input, answers as they are generated."""

import math
import sys
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import PreTrainedConfig, TextStreamer

from cli.job.inputs import check_whole
from cli.options.settings import Settings
from common.activity import activity
from common.data.template import limited_rendering
from common.errors import UserError
from common.hardware.machine import memory_available_bytes
from common.limits import LimitExceeded
from common.models.adapters.options import SavedAdapter
from common.models.checkpoint.companions import Companions
from common.models.checkpoint.compressed.formats import CompressedShards
from common.models.checkpoint.in_memory import load_in_memory
from common.models.checkpoint.watched import WatchedFiles
from common.models.checkpoint.writer import first_nonfinite
from common.models.generation import FILE, generation_config_of, stops_of
from common.models.presets import load_config
from common.models.task_type import task_type_of
from common.units import format_bytes

MOST_TOKENS = 1024
_WORKING_BYTES = 2 << 30  # Device memory for keys and values of a conversation, logits, and CUDA's libraries
_CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS")  # Tasks of adapters, as peft names them


def run_chat(settings: Settings) -> None:
    """Answer each line of standard input, knowing the lines and answers before it, until the input ends."""
    watched = WatchedFiles(settings.model, settings.adapter)
    for warning in check_whole(settings):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    config, checkpoint = load_config(settings.model)
    if checkpoint is None:
        raise UserError(f"{settings.model} is a preset of random weights: give --model a checkpoint.")
    if not task_type_of(config).generates:
        raise UserError(
            f"{settings.model} is {task_type_of(config).value}, which writes no text: chat cannot use it."
        )
    adapter = None if settings.adapter is None else SavedAdapter(settings.adapter.expanduser())
    if adapter is not None and adapter.config().task_type in _CLASSIFIERS:
        raise UserError(f"--adapter {adapter.directory} is that of a classifier, which writes no text.")
    if adapter is not None and (warning := adapter.warning(checkpoint)):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    with activity(f"loading {settings.model}", announced=True):
        companions = Companions(checkpoint, None if adapter is None else adapter.directory)
        tokenizer = _tokenizer(companions, config)
        model = _model(checkpoint, adapter)
    watched.check()
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    ends = stops_of(model.generation_config)
    messages: list[dict[str, str]] = []
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    print("Type a line; end with Ctrl-D.", file=sys.stderr, flush=True)
    for line in filter(None, map(str.strip, sys.stdin)):
        messages.append({"role": "user", "content": line})
        try:
            with limited_rendering():
                text: Any = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True
                )
        except LimitExceeded as error:
            raise UserError(f"The chat template {error} for this conversation.") from error
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
            why = (
                f"the model's context of {context} tokens is full"
                if limit == room
                else f"cut after {limit} tokens"
            )
            print(f"({why})", file=sys.stderr, flush=True)
        messages.append(
            {"role": "assistant", "content": str(tokenizer.decode(tokens, skip_special_tokens=True))}
        )


def _tokenizer(companions: Companions, config: PreTrainedConfig) -> Any:
    tokenizer: Any = companions.load_tokenizer(config)
    if tokenizer.chat_template is None:
        raise UserError(
            f"{companions.checkpoint} has no chat template: train with --chat-template NAME, which saves one."
        )
    return tokenizer


def _model(checkpoint: Path, adapter: SavedAdapter | None) -> Any:
    tensors = CompressedShards(checkpoint).tensors.values()
    need = sum(math.prod(stored.shape) * stored.dtype.itemsize for stored in tensors)
    on_gpu = torch.cuda.is_available() and need + _WORKING_BYTES < torch.cuda.mem_get_info()[0]
    if not on_gpu and need > memory_available_bytes():
        raise UserError(
            f"{checkpoint} takes {format_bytes(need)}, and {format_bytes(memory_available_bytes())} of memory are "
            "free: chat needs all of it in memory."
        )
    device = "cuda" if on_gpu else "cpu"
    model, missing = load_in_memory(checkpoint)
    if missing:  # transformers gives them random values
        raise UserError(f"{checkpoint} lacks {missing[0]}: copy or download the model again.")
    _check_finite(model, checkpoint)
    model = model.to(device)
    if adapter is None:
        return model.eval()
    if (adapter.directory / FILE).is_file():  # of a run whose answers end with another token
        model.generation_config = generation_config_of(model.config, adapter.directory)
    adapted = _adapted(model, adapter)
    _check_finite(adapted, adapter.directory)
    return adapted.eval()


def _check_finite(model: Any, directory: Path) -> None:
    if (name := first_nonfinite(dict(model.named_parameters()))) is not None:
        raise UserError(
            f"{directory} holds a NaN or an infinity, in {name}, and would write nothing sensible: take another."
        )


def _adapted(model: Any, adapter: SavedAdapter) -> Any:
    """Return the model with adapters, of which peft leaves at their first values what the file lacks."""
    try:
        adapted: Any = peft.PeftModel.from_pretrained(model, str(adapter.directory))
    except RuntimeError as error:  # names all tensors of another shape
        raise UserError(
            f"--adapter {adapter.directory} is that of another model: {adapter.advice}"
        ) from error
    expected, known = (
        peft.get_peft_model_state_dict(adapted, save_embedding_layers=with_embeddings)
        for with_embeddings in (False, True)
    )
    adapter.check(*({name: value.shape for name, value in state.items()} for state in (expected, known)))
    return adapted
