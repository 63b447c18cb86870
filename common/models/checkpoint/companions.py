"""The files next to weights, of a model and of an adapter: which tokenizer and which chat template count.

A run writes its own next to its adapters, and so do other tools: an adapter was trained with these.
"""

import contextlib
import json
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.files import copy_into, read_text_file
from common.models.checkpoint.writer import (
    CHAT_TEMPLATE,
    OTHER_TEMPLATES,
    TEMPLATE_FILES,
    digest_of,
    tokenizer_files,
    write_template,
)

_TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
# Text that tokenizers split in different ways: at digits, cases, marks, and spaces.
_SAMPLE = "x\nIn 2024, 1234567 users said: It's HERE, isn't IT?\n\n\tCafe\u0301 für 東京!!  x=y_z;\n"
_FIRST_TOKENS = 3  # Tokens of the sample that are not compared
_CORRECTED = "fix_mistral_regex"  # What transformers calls its correction
_PROCESSORS = ("*processor_config.json",)
_VOCABULARIES = (
    "tokenizer.json", "tokenizer*.model", "vocab.*", "spiece.model", "sentencepiece*.model", "*.tiktoken",
)  # fmt: skip


@dataclass(frozen=True)
class Companions:
    """What comes with the weights of a model, or of a model with an adapter: that of the adapter, where it has any."""

    checkpoint: Path
    adapter: Path | None = None

    @cached_property
    def tokenizer(self) -> Path:
        """Directory of the tokenizer: the adapter's if it has one, with other content than the model's."""
        if self.adapter is None or not any(any(self.adapter.glob(pattern)) for pattern in _VOCABULARIES):
            return self.checkpoint
        files = [
            file for file in tokenizer_files(self.adapter) if not _is(file, *TEMPLATE_FILES, *_PROCESSORS)
        ]
        others = [(file, self.checkpoint / file.name) for file in files if file.is_file()]
        same = all(other.is_file() and digest_of(file) == digest_of(other) for file, other in others)
        return self.checkpoint if same else self.adapter

    @cached_property
    def processor(self) -> Path:
        """Directory of the processor of images."""
        if self.adapter is not None and self.tokenizer == self.adapter:
            files = [file for file in tokenizer_files(self.adapter) if _is(file, *_PROCESSORS)]
            return self.adapter if files else self.checkpoint
        return self.checkpoint

    @cached_property
    def template(self) -> str | dict[str, str] | None:
        """The chat template, or several by name, if it is not that which comes with the tokenizer."""
        if self.adapter is None:
            return None
        if (self.adapter / CHAT_TEMPLATE).is_file():
            return _template_in(self.adapter)
        lacks_any = self.tokenizer == self.adapter and _template_in(self.adapter) is None
        return _template_in(self.checkpoint) if lacks_any else None

    @cached_property
    def files(self) -> list[Path]:
        """Files and directories besides weights and :attr:`template` that a result gets."""
        names = {file.name: file for file in tokenizer_files(self.tokenizer)}
        for file in tokenizer_files(self.checkpoint):
            if _is(file, *_PROCESSORS):
                names.setdefault(file.name, file)
        without = () if self.template is None else TEMPLATE_FILES
        return [names[name] for name in sorted(names) if not _is(names[name], *without)]

    def load_tokenizer(self, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
        """Return the tokenizer, with its chat template. ``config`` is that of the model."""
        more: dict[str, Any] = {} if self.tokenizer == self.checkpoint else {"config": config}
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            self.tokenizer, local_files_only=True, trust_remote_code=False, **more
        )
        follow_file(tokenizer, self.tokenizer)
        self.set_template(tokenizer)
        return tokenizer

    def set_template(self, holder: Any) -> None:
        """Give a tokenizer, or a processor, the chat template."""
        if self.template is not None:
            holder.chat_template = self.template

    def write(self, folder: Path) -> None:
        """Put what a result gets into a folder that has the files of the model, and is moved into place later."""
        if self.adapter is None:
            return
        for old in tokenizer_files(folder):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        for file in self.files:
            copy_into(folder, file)
        if self.template is not None:
            write_template(folder, self.template)

    def digests(self) -> dict[tuple[Path, str], str]:
        """Return a hash of each file that a result gets, by its directory and its path in that."""
        entries = [*self.files, *([] if self.template is None else self._template_files)]
        files = [
            (entry.parent, file)
            for entry in entries
            for file in ([entry] if entry.is_file() else sorted(entry.rglob("*")))
            if file.is_file()
        ]
        return {(folder, file.relative_to(folder).as_posix()): digest_of(file) for folder, file in files}

    @property
    def _template_files(self) -> list[Path]:
        folders = [folder for folder in (self.adapter, self.checkpoint) if folder is not None]
        files = [folder / name for folder in folders for name in (CHAT_TEMPLATE, _TOKENIZER_CONFIG)]
        first = next(file for file in files if file.is_file() and _template_in(file.parent) is not None)
        others = first.parent / OTHER_TEMPLATES
        return [first, *([others] if others.is_dir() else [])]


def follow_file(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Let a BPE tokenizer split texts as ``tokenizer.json`` in its directory says.

    Classes of transformers 5 take the vocabulary alone from that file, and split by the rules of their family.
    """
    file = directory / _TOKENIZER
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or type(tokenizer) is PreTrainedTokenizerFast:
        return  # The latter is what the file says
    if not file.is_file() or not isinstance((written := Tokenizer.from_file(str(file))).model, models.BPE):
        return
    if not _split_alike(tokenizer.backend_tokenizer, written):
        for part in ("model", "normalizer", "pre_tokenizer", "decoder"):
            setattr(tokenizer.backend_tokenizer, part, getattr(written, part))


def doubt_about(tokenizer: PreTrainedTokenizerBase, directory: Path) -> str:
    """Return a warning if transformers takes the rule by which texts are split for a wrong one; else empty."""
    corrected = getattr(getattr(tokenizer, "backend_tokenizer", None), _CORRECTED, None)
    if corrected is None or (not corrected and _CORRECTED in tokenizer.init_kwargs):
        return ""
    file = directory / _TOKENIZER
    if corrected and (
        not file.is_file() or _split_alike(tokenizer.backend_tokenizer, Tokenizer.from_file(str(file)))
    ):
        return ""
    return (
        f"{file} may split texts in another way than Mistral's own tokenizer, as many of transformers 4 do. To correct "
        f"it, AutoTokenizer.from_pretrained({str(directory)!r}, {_CORRECTED}=True).save_pretrained(...); to keep it, "
        f'"{_CORRECTED}": false in {_TOKENIZER_CONFIG}'
    )


def _split_alike(left: Tokenizer, right: Tokenizer) -> bool:
    ids, others = (each.encode(_SAMPLE, add_special_tokens=False).ids for each in (left, right))
    # A space before the text is also decided by tokenizer_config.json.
    count = min(len(ids), len(others)) - _FIRST_TOKENS
    return ids[-count:] == others[-count:]


def _template_in(folder: Path) -> str | dict[str, str] | None:
    """Return the chat template in a directory, or several by name; None if there is none in a form of today."""
    if (file := folder / CHAT_TEMPLATE).is_file():
        others = {
            other.stem: read_text_file(other) for other in sorted((folder / OTHER_TEMPLATES).glob("*.jinja"))
        }
        return {"default": read_text_file(file), **others} if others else read_text_file(file)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        template = json.loads(read_text_file(folder / _TOKENIZER_CONFIG)).get("chat_template")
        return template if isinstance(template, str) else None
    return None


def _is(file: Path, *patterns: str) -> bool:
    return any(fnmatch(file.name, pattern) for pattern in patterns)
