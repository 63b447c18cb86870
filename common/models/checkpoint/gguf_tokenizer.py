"""Tokenizers of GGUF files: what the file says of them and transformers does not read is applied, or refused.

A byte-level file names the rule by which texts are split (``tokenizer.ggml.pre``), and llama.cpp's loader has the rest
by that name. transformers splits by GPT-2's rule where it does not know the name, which changes the tokens of most
texts.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

try:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
except ImportError:  # older transformers split all files by GPT-2's rule
    GGUF_PRE_TOKENIZER_SPLITS = {}

# Names as in llama.cpp's loader (llama-vocab.cpp).
_GPT2 = {
    "gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion", "granite-docling",
}  # fmt: skip
_GPT2_AND_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
# Words of the vocabulary are taken whole, and texts begin with BOS unless the file says otherwise.
_WHOLE_WORDS_AND_BOS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
}  # fmt: skip
_INSTEAD = "train on the checkpoint that the file was made of (--model DIRECTORY)"
_REFUSED = ("add_sep_token", "precompiled_charsmap", "remove_extra_whitespaces")


def read_tokenizer(file: Path, keys: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file.

    Args:
        keys: values of the file's metadata by name.

    Raises:
        ValueError: if it makes tokens in a way that is not read.
    """
    given = {name.removeprefix("tokenizer.ggml."): value for name, value in keys.items()}
    for name in _REFUSED:
        if given.get(name):
            raise ValueError(f"it has tokenizer.ggml.{name}, which is not read: {_INSTEAD}")
    is_byte_level = given.get("model") == "gpt2"
    pre = given.get("pre") if is_byte_level else None
    if is_byte_level and pre not in _GPT2 | _GPT2_AND_DIGITS | set(GGUF_PRE_TOKENIZER_SPLITS):
        what = f"its tokenizer.ggml.pre is {pre!r}" if pre else "it has no tokenizer.ggml.pre"
        raise ValueError(f"{what}, and how its tokenizer splits texts is not known: {_INSTEAD}")
    names = {"gguf_file": file.name, "local_files_only": True}
    # What the file itself says of BOS takes precedence in transformers.
    bos = {"add_bos_token": True} if pre in _WHOLE_WORDS_AND_BOS else {}
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(file.parent, **names, **bos)
    backend = tokenizer.backend_tokenizer
    if pre in _WHOLE_WORDS_AND_BOS:
        assert isinstance(backend.model, models.BPE)
        backend.model.ignore_merges = True
    if pre in _GPT2_AND_DIGITS:
        split = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(split)
    if given.get("model") == "llama" and not given.get("add_space_prefix", True):
        _begin_without_space(backend)
    return tokenizer


def _begin_without_space(backend: Tokenizer) -> None:
    """Let a tokenizer of sentencepiece's kind add no space before a text."""
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    elif backend.normalizer is not None:  # of Phi-3, or of Gemma, which has this one
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
