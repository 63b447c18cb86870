"""Tiny configurations of the same family as a given one, for proofs on a small scale."""

from common.models.miniature.shrink import TOKENS, VOCABULARY, miniature

__all__ = ["TOKENS", "VOCABULARY", "miniature"]
