"""LoRA+ (Hayou et al., arXiv:2402.12354): the second factors of LoRA learn faster than the first ones.

Which parameters these are is the rule of ``peft.optimizers.create_loraplus_optimizer``: whatever has ``lora_B`` in its
name, and trained vectors (DoRA's magnitudes, biases).
"""

from collections.abc import Collection, Sequence

from common.errors import UserError

_EMBEDDING = ".lora_embedding_"
"""Part of the names of an embedding's adapters, for which ``peft`` has a fixed learning rate instead."""


def learns_faster(name: str, shape: Sequence[int]) -> bool:
    """Return whether the ratio of LoRA+ applies to a trained parameter."""
    return "lora_B" in name or len(shape) == 1


def check_lora_plus(ratio: float, names: Collection[str]) -> None:
    """Refuse LoRA+ where nothing has two factors, or where they have no such ratio.

    Args:
        ratio: learning rate of the second factors over that of the first ones; 1 is plain LoRA, always accepted.
        names: names of the adapters' parameters.

    Raises:
        UserError: there is no LoRA, or it adapts an embedding.
    """
    if ratio == 1:
        return
    if not any("lora_B" in name for name in names):
        raise UserError(
            f"--lora-plus-ratio {ratio:g} is about the two factors of LoRA adapters, and nothing has them here: "
            "train LoRA adapters, or leave it out."
        )
    embedding = next((name for name in names if _EMBEDDING in name), None)
    if embedding is not None:
        raise UserError(
            f"--lora-plus-ratio {ratio:g} says nothing about an embedding's adapters, such as {embedding}: leave it "
            "out, or adapt other layers (--lora-targets)."
        )
