"""Rates of a GPU's parts: what products, attention, and memory reach each alone, from presets (``configs/gpus``)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Passes over memory that compiled code saves of those that eager code makes between products. Learned from torchtitan's
# Llama 8B (scripts/published/holdouts.toml): with it, eager and compiled rows give the same rate of products.
FUSED_PART = 0.35
# Part of a memory's data sheet rate that passes over it reach: 0.8 to 0.9 in STREAM-like copies. Assumed.
MEMORY_PART = 0.85


@dataclass(frozen=True)
class AttentionRates:
    """FLOPs per second of one kernel of causal attention, of which only the pairs of tokens that it computes count."""

    forward: float
    backward: float  # Of 2.5 times the forward pass's FLOPs


@dataclass(frozen=True)
class ComputeRates:
    """What the parts of a training step reach on a GPU. Rates of whole steps are no part's rates."""

    dense: float  # FLOPs per second of large products of matrices
    experts: float  # FLOPs per second of the grouped products of experts
    attention: Mapping[str, AttentionRates]  # By kernel: `flash2`, and others where they are known
    memory: float  # Bytes per second of the device's memory, of passes over it

    @property
    def flash2(self) -> AttentionRates:
        """Return the kernel that PyTorch's attention takes on all of these GPUs, and rows in chunks take."""
        return self.attention["flash2"]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "ComputeRates":
        """Return the rates in a preset's fields, which are in 10^12 operations and 10^9 bytes a second."""
        return cls(
            dense=fields["dense_tflops"] * 1e12,
            experts=fields["experts_tflops"] * 1e12,
            attention={
                kernel: AttentionRates(rates["forward_tflops"] * 1e12, rates["backward_tflops"] * 1e12)
                for kernel, rates in fields["attention"].items()
            },
            memory=fields["memory_gb_per_s"] * 1e9 * MEMORY_PART,
        )

    def scaled(self, factor: float, memory: float) -> "ComputeRates":
        """Return rates that are ``factor`` times as high, with another memory's bytes per second."""
        attention = {
            kernel: AttentionRates(factor * rates.forward, factor * rates.backward)
            for kernel, rates in self.attention.items()
        }
        return ComputeRates(factor * self.dense, factor * self.experts, attention, memory)
