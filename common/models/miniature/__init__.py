"""Tiny configurations of the same family as a given one, made by rule: proofs on a small scale are built from them.

``shrink``       every field of a configuration, made small
``layers``       which layers stay
``field_names``  what a field counts, told by its name
"""

from common.models.miniature.shrink import TOKENS, VOCABULARY, miniature

__all__ = ["TOKENS", "VOCABULARY", "miniature"]
