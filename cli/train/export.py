"""Write what was trained for others to load, and let it answer a prompt."""

import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
import transformers
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from cli.job.data import tokenizer_of, write_chat_template
from cli.job.job import Job, TrainedModel
from common.activity import activity
from common.data.encode import Encoder
from common.data.shapes import PlainText
from common.errors import on_one_line
from common.models.adapters.adapters import MERGED
from common.randomness import seed_run
from fuyou.runtime.device import memory_limits, open_device


def export(job: Job, model: TrainedModel, directory: Path, is_rank0: bool, merge: bool = False) -> None:
    """Write what was trained to ``directory``, and with ``merge`` the whole model to ``MERGED`` inside. Collective."""
    model.save_pretrained(directory, merge=merge)
    if is_rank0:
        for folder in [directory, *([directory / MERGED] if merge else [])]:
            write_chat_template(job.settings, folder)


def print_sample(job: Job, prompt: str) -> None:
    """Print ``prompt`` and the saved model's answer as it is generated. Never raises: the run itself has succeeded."""
    try:
        with warnings.catch_warnings(action="ignore"), TemporaryDirectory(prefix="sample-", dir=job.output) as offload:
            with activity("loading the saved model for the sample"):
                tokenizer = tokenizer_of(job.settings, job.checkpoint, job.template_date, "--sample")
                ids = _prompt_ids(tokenizer, prompt).to(job.device)
                model = _load(job, tokenizer, offload)
            print(f"sample   {prompt}", end="", flush=True)
            seed_run(job.settings.seed)
            start, streamer = time.monotonic(), TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            result = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer)
            new, seconds = result.shape[1] - ids.shape[1], time.monotonic() - start
            print(f"         ({new} tokens in {seconds:.1f} s)", flush=True)
    except KeyboardInterrupt:
        print("\nsample   stopped; the result is saved", flush=True)
    except Exception as error:  # of any library: it must not make a run fail whose result is saved
        advice = " (with --merge, no adapters are loaded)" if job.settings.trains_adapters else ""
        reason = f"{type(error).__name__}: {on_one_line(error)}"
        print(f"\nsample   failed: {reason}; the result is saved{advice}", flush=True)


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    if tokenizer.chat_template is not None:
        message = [{"role": "user", "content": prompt}]
        rendered: Any = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        return torch.tensor([rendered["input_ids"]])
    ids = [int(token) for part in Encoder(tokenizer).encode([PlainText("", prompt, ends=False)]) for token in part.ids]
    return torch.tensor([ids or [tokenizer.bos_token_id or tokenizer.eos_token_id or 0]])


def _load(job: Job, tokenizer: PreTrainedTokenizerBase, offload: str) -> Any:
    settings, adapters = job.settings, job.settings.trains_adapters and not job.settings.merge
    host, device = memory_limits(open_device(job.device), settings.host_memory, settings.device_memory)
    limits = {"cpu": host} | ({} if job.gpu is None else {torch.device(job.device).index or 0: device})
    source = job.checkpoint if adapters else job.output / MERGED if settings.merge else job.output
    model = getattr(transformers, job.task_type.auto_class).from_pretrained(
        source, dtype="auto", device_map="auto", max_memory=limits, offload_folder=offload, local_files_only=True
    )
    stops = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])} - {None}
    model.generation_config = GenerationConfig(max_new_tokens=settings.sample_tokens, eos_token_id=sorted(ends) or None)
    return _with_adapters(model, job.output, job.device) if adapters else model


def _with_adapters(model: Any, directory: Path, device: str) -> peft.PeftModel:
    base = {id(value) for value in model.parameters()}
    adapted = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(str(directory)), low_cpu_mem_usage=True)
    for name, value in list(adapted.named_parameters()):
        if value.is_meta and id(value) not in base:
            module, _, attribute = name.rpartition(".")
            values = torch.nn.Parameter(torch.empty_like(value, device=device), requires_grad=False)
            adapted.get_submodule(module)._parameters[attribute] = values
    peft.set_peft_model_state_dict(adapted, peft.load_peft_weights(str(directory), device=device))
    return adapted.eval()
