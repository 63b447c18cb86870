"""``--sample``: a prompt continued by the model that was just trained, so that people see what it has learnt."""

import sys
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from fuyou import Engine


class SampleOutput:
    """Prints text as its tokens come.

    Args:
        tokenizer: the model's tokenizer.
        prompt: what is continued, printed at once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: str):
        self._tokenizer, self._tokens, self._shown = tokenizer, list[int](), ""
        print(f"sample   {prompt}", end="", flush=True)

    def __call__(self, newest: list[int | None]) -> None:
        """Print what the newest token adds."""
        token = newest[0]
        if token is None or token == self._tokenizer.eos_token_id:
            return
        self._tokens.append(token)
        # A token may be a part of a letter, or a space that only shows before the next word: decode from the start.
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)).removesuffix("\ufffd")
        sys.stdout.write(text.removeprefix(self._shown))
        sys.stdout.flush()
        self._shown = text


def print_sample(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    longest: int,
    seed: int,
    as_chat: bool = False,
) -> None:
    """Print the prompt and, token by token, what follows, to the end of the document; then how fast that was.

    Args:
        engine: whose weights generate.
        tokenizer: the model's tokenizer.
        prompt: text to continue.
        tokens: how many to make at most.
        temperature: 0 takes the likeliest token, more draws.
        longest: sequence that memory was planned for; of a longer prompt, its end is taken.
        seed: seed of what is drawn.
        as_chat: whether the prompt is a user's message, which the chat template puts between its marks.
    """
    ids = _prompt_ids(tokenizer, prompt, as_chat)[:, -longest:]
    if not ids.numel():  # an empty prompt, and a tokenizer that begins documents with nothing
        ids = torch.tensor([[tokenizer.bos_token_id or tokenizer.eos_token_id or 0]])
    end = tokenizer.eos_token_id
    options: dict[str, Any] = {
        "temperature": temperature,
        "seed": seed,
        "eos_token_id": () if end is None else end,
        "on_tokens": SampleOutput(tokenizer, prompt),
    }
    most = min(tokens, longest - ids.shape[1])
    if most < 1:
        print(f"\n         (nothing: the prompt is {ids.shape[1]} tokens long, and --seq-len is {longest})", flush=True)
        return
    try:
        made = engine.generate(ids, most, **options)
    except UserError:  # a family that keeps no keys and values, or blocks in pieces
        made = engine.generate(ids, most, use_cache=False, **options)
    print(f"\n         ({len(made.tokens[0])} tokens in {made.seconds:.1f} s; each reads the model once)", flush=True)


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
