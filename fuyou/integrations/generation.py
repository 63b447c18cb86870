"""``generate()`` as trainers call it on a model: by the engine, with the options of transformers that it knows."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import GenerationConfig

from common.errors import UserError
from fuyou.engine.engine import Engine

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "min_p": (None, 0, 0.0),
    "typical_p": (None, 1.0),
    "min_new_tokens": (None, 0),
    "min_length": (None, 0),
    "suppress_tokens": (None, []),
    "bad_words_ids": (None, []),
}
"""Options that the engine does not have, with the values that ask for nothing."""


def generate_as_transformers(
    engine: Engine,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return prompts and what follows, int64 ``[B, S + N]``, padded after their ends.

    What is drawn follows PyTorch's own generator, as transformers' draws do; the tokens are others.

    Args:
        engine: that generates.
        input_ids: prompts, int64 ``[B, S]``.
        attention_mask: 0 where they are padded.
        generation_config: options of transformers.
        options: more of them, which count more.

    Raises:
        UserError: an option asks for what the engine does not do.
    """
    known: dict[str, Any] = {} if generation_config is None else generation_config.to_dict()
    known |= {name: value for name, value in options.items() if value is not None}
    for name, neutral in _NEUTRAL.items():
        if known.get(name) not in neutral:
            raise UserError(f"The engine generates without {name}, and it is {known[name]}: leave it out.")
    draws = bool(known.get("do_sample"))
    if draws and known.get("top_k") not in (None, 0):
        raise UserError(f"The engine draws from all tokens or by top_p, and top_k is {known['top_k']}: set it to 0.")
    longest, most = input_ids.shape[1], known.get("max_new_tokens")
    if most is None:
        raise UserError("Say with max_new_tokens how long sequences may become.")
    ends, padding = known.get("eos_token_id"), known.get("pad_token_id")
    made = engine.generate(
        input_ids,
        most,
        temperature=_or(known.get("temperature"), 1.0) if draws else 0.0,
        top_p=_or(known.get("top_p"), 1.0) if draws else 1.0,
        eos_token_id=list(ends) if isinstance(ends, Iterable) else ends,
        seed=int(torch.randint(2**31, ())) if draws else 0,
        attention_mask=torch.ones_like(input_ids) if attention_mask is None else attention_mask,
    )
    grown = longest + max(map(len, made.tokens))
    result = torch.full((len(input_ids), grown), _or(padding, 0), dtype=input_ids.dtype)
    result[:, :longest] = input_ids
    for row, tokens in enumerate(made.tokens):
        result[row, longest : longest + len(tokens)] = tokens
    return result


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
