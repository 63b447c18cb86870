"""``--sample``: a prompt continued by the model that was just trained, so that people see what it has learnt."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


def continuation(
    logits_after: Callable[[torch.Tensor], torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    tokens: int,
    temperature: float,
    longest: int,
    seed: int,
    as_chat: bool = False,
) -> Iterator[str]:
    """Yield pieces of text as they are made, to the end of the document or of the model's context.

    Args:
        logits_after: returns the logits of the next token ``[V]``, after ``[1, S]`` tokens.
        tokenizer: the model's tokenizer.
        prompt: text to continue.
        tokens: how many to make at most.
        temperature: 0 takes the likeliest token, more draws.
        longest: sequence that the model can take.
        seed: seed of what is drawn.
        as_chat: whether the prompt is a user's message, which the chat template puts between its marks.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = _prompt_ids(tokenizer, prompt, as_chat)[:, -longest:]
    if not ids.numel():  # an empty prompt, and a tokenizer that begins documents with nothing
        ids = torch.tensor([[tokenizer.bos_token_id or tokenizer.eos_token_id or 0]])
    prompt_tokens, shown = ids.shape[1], ""
    for _ in range(min(tokens, longest - prompt_tokens)):
        logits = logits_after(ids)
        if temperature > 0:
            chosen = torch.multinomial(torch.softmax(logits.double() / temperature, 0), 1, generator=generator)
        else:
            chosen = logits.argmax().view(1)
        if int(chosen) == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, chosen.view(1, 1)], dim=1)
        # A token may be a part of a letter, or a space that only shows before the next word: decode from the start.
        text = str(tokenizer.decode(ids[0, prompt_tokens:], skip_special_tokens=True)).removesuffix("\ufffd")
        yield text.removeprefix(shown)
        shown = text


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, as_chat: bool) -> torch.Tensor:
    """Return the prompt's tokens ``[1, S]``."""
    if not as_chat:
        ids: torch.Tensor = tokenizer(prompt, return_tensors="pt")["input_ids"]
        return ids
    asked: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    ids = asked["input_ids"]
    return ids


def print_sample(pieces: Iterator[str], prompt: str) -> None:
    """Print the prompt and, piece by piece, what follows; then how fast that was."""
    start_time, count = time.monotonic(), 0
    print(f"sample   {prompt}", end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
        count += 1
    seconds = time.monotonic() - start_time
    print(f"\n         ({count} tokens in {seconds:.1f} s; each reads the whole model once)", flush=True)
