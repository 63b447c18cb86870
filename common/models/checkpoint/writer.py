"""Write checkpoints of transformers; files get their names when all are complete and on the drive."""

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import FinetuneError, UserError
from common.files import copy_into, read_text_file, replace_file, sync, sync_tree
from common.models.checkpoint.shards import DTYPES, INDEX, SINGLE, to_disk
from common.models.checkpoint.sources import CheckpointSource
from common.models.generation import FILE as GENERATION
from common.models.meta_model import build_meta_model
from common.models.structure import fp32_parameters, parameter_names, stored_names
from common.store.errors import described
from common.store.posix import write_new_file

# Name of the folder for unfinished files, inside the directory that they are for
STAGING_FOLDER = ".export-incomplete"


class NonFiniteWeights(FinetuneError):
    """Weights to export hold a NaN or an infinity; no file was put in place."""

    def __init__(self, name: str):
        self.name = name
        super().__init__(
            f"Nothing was exported, and what was there before is as it was: {name} holds a NaN or an infinity. Train "
            "again with a lower --lr or with --max-grad-norm, or export it in Python with allow_nonfinite=True."
        )


def first_nonfinite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor that holds a NaN or an infinity; None: none does."""
    for name, value in tensors.items():
        if value.is_floating_point() and value.numel():
            wide = value.to(torch.bfloat16) if value.element_size() == 1 else value  # fp8 cannot be compared
            # One pass and no copy: aminmax propagates NaN.
            if not all(torch.isfinite(bound) for bound in torch.aminmax(wide)):
                return name
    return None


def make_staging_folder(directory: Path) -> Path:
    """Make the empty folder in which files for ``directory`` are made, and that directory if need be."""
    discard_staging_folder(directory)
    folder = directory / STAGING_FOLDER
    folder.mkdir(parents=True)
    return folder


def refuse_shadowing(directory: Path, other: str, loads: str) -> None:
    """Refuse a directory that holds ``other``, a file with which transformers would load something else as well."""
    if (directory / other).exists():
        raise UserError(
            f"{directory} holds {other}, with which {loads}. Remove it, or write to another directory."
        )


def discard_staging_folder(directory: Path) -> None:
    """Remove unfinished files, of this process or of one that was killed."""
    shutil.rmtree(directory / STAGING_FOLDER, ignore_errors=True)


def save_tensors(file: Path, tensors: Mapping[str, torch.Tensor], **metadata: str) -> None:
    """Write a new safetensors file, with ``metadata`` in its header, and sync it.

    ``safetensors`` would write it through the page cache, at a quarter of a drive's rate. A failure leaves a part of
    it, so use it in the folder of :func:`make_staging_folder`.
    """
    # Each at its alignment
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(sorted({"format": "pt", **metadata}.items()))}
    end = 0
    for name, value in ordered:
        start = end
        end += value.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    parts = [np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)]
    parts += [value.contiguous().view(-1).view(torch.uint8).numpy() for _, value in ordered]
    with described("writing", file):
        write_new_file(file, parts)


_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def move_into_place(directory: Path, replaced: Iterable[Path], last: Sequence[str]) -> None:
    """Sync what the folder of ``directory`` holds, move it to ``directory``, and remove the folder.

    Args:
        directory: the directory that was given to :func:`make_staging_folder`.
        replaced: older files, if they exist; removed before anything is moved.
        last: names of files that are moved after all others, in this order: without them nobody loads the rest.
    """
    folder = directory / STAGING_FOLDER
    with described("writing", folder):
        sync_tree(folder)
        for file in replaced:
            file.unlink(missing_ok=True)
        for name in [*sorted({file.name for file in folder.iterdir()} - set(last)), *last]:
            if (folder / name).is_dir():  # of templates: one that is there cannot be replaced
                shutil.rmtree(directory / name, ignore_errors=True)
            os.replace(folder / name, directory / name)
        folder.rmdir()
        sync(directory)


# Name of the file that transformers takes a tokenizer's or processor's chat template from; of the folder with those of
# other names, of which one may win (``tool_use``); and patterns of these and of older files, which win, too.
CHAT_TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates"
TEMPLATE_FILES = ("chat_template*", OTHER_TEMPLATES)
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece*.model", "*.tiktoken", *TEMPLATE_FILES,
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip

# What transformers 4 reads where transformers 5 has rope_parameters.
_OLDER_ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")


class CheckpointWriter:
    """Writes the files that ``model.save_pretrained`` would, without ever holding the model.

    Nothing that looks like a checkpoint appears in ``directory`` before :meth:`finish`: files are written into a hidden
    folder inside it, and the one without which transformers loads nothing (the index) is moved into place last.

    Args:
        directory: made if it does not exist. A checkpoint in it is replaced, by :meth:`finish`.
        model: from :func:`common.models.meta_model.build_meta_model`; its persistent buffers are written as they are.
        config: the configuration as it was loaded (``model.config`` has been changed for training).
        dtype: dtype of the weights on disk. Parameters that the family keeps in fp32 are written in fp32.
        shard_bytes: a shard is written when the next tensor would make it larger, while the next is collected.
            Memory: twice this, and the parameters of one :meth:`add`.
        source: the checkpoint that training began with, if there was one. Every tensor in it that no added parameter
            replaces goes into the new one: weights in ``dtype``, and what the model does not use as it is, with its
            tokenizer. Added parameters get the names that they have there.
        unties: whether parameters that the model ties are added with different values: the new checkpoint is that of
            an untied model.
        allow_nonfinite: whether tensors may hold NaNs and infinities. If not, nothing is written from the first such
            tensor on, and :meth:`finish` refuses: until then all ranks may have to keep reading together.
    """

    def __init__(
        self,
        directory: Path,
        model: PreTrainedModel,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        shard_bytes: int,
        allow_nonfinite: bool = False,
        source: CheckpointSource | None = None,
        unties: bool = False,
    ) -> None:
        refuse_shadowing(directory, "adapter_config.json", "transformers would change the new weights")
        self.directory = directory
        self.config = copy.deepcopy(config)
        if unties:
            model = _untied(self.config, model)
            source = None if source is None else CheckpointSource(source.shards.directory, model)
        self.model = model
        self.dtype = dtype
        self.shard_bytes = shard_bytes
        self._stored_name = stored_names(model)
        self._fp32 = {self._stored_name[name] for name in fp32_parameters(model)}
        self._shapes = {
            self._stored_name[name]: parameter.shape for name, parameter in model.named_parameters()
        }
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        self._allows_nonfinite = allow_nonfinite
        self._source = source
        self._nonfinite: str | None = None
        # Names on disk, by the names that ``save_pretrained`` would give
        self._names: dict[str, list[str]] = {}
        if source is not None:
            meta = {self._stored_name[name]: parameter.data for name, parameter in model.named_parameters()}
            self._names = source.stored_names(to_disk(model, meta))
        self._written: set[str] = set()
        self._shard: dict[str, torch.Tensor] = {}
        self._shard_of: dict[str, int] = {}
        self._shard_size = self._shards = self._total_size = 0
        self._threads = ThreadPoolExecutor(1, "write shards")
        self._writing: Future[None] | None = None
        self.folder = make_staging_folder(directory)  # For files that come with it, too

    def add(self, named: dict[str, torch.Tensor], copy: bool = True) -> None:
        """Add some parameters, for instance a block's.

        Args:
            named: parameters by name in the model. Those that are one tensor on disk have to come in one call.
            copy: whether to copy them; if not, they must not change.
        """
        copies = {}
        for name, value in named.items():
            stored = self._stored_name.get(name)
            if stored is None or self._shapes[stored] != value.shape:
                raise FinetuneError(
                    f"Cannot export {name} of shape {list(value.shape)}: the model has none such."
                )
            if stored not in self._written:  # a tied parameter may come under several of its names
                dtype = torch.float32 if stored in self._fp32 else self.dtype
                copies[stored] = value.detach().to("cpu", dtype, copy=copy)
                self._written.add(stored)
        self._append(copies)

    def finish(self) -> None:
        """Write the last shard, the index, the configurations and the source's tokenizer, and move all into place.

        Raises:
            NonFiniteWeights: if a tensor holds a NaN or an infinity; the directory is unchanged.
            FinetuneError: if parameters are missing, or the source cannot be read any more; the directory is unchanged.
        """
        source = self._source
        missing = sorted(self._shapes.keys() - self._written)
        if source is not None:
            missing = [name for name in missing if not source.made_from(name)]
        if missing:
            raise FinetuneError(
                f"Export incomplete: {len(missing)} parameters never came, {missing[0]} among them."
            )
        ignored = set(self.model._keys_to_ignore_on_save or ())
        buffers = self.model.state_dict().keys() - self._stored_name.keys() - ignored
        if source is not None:
            buffers = {name for name in buffers if not source.made_from(name)}
        self._append({name: self.model.get_buffer(name).clone() for name in sorted(buffers)})
        if self._nonfinite is not None:
            raise NonFiniteWeights(self._nonfinite)
        if source is not None:
            self._copy_untouched(source)
        self._flush()
        self._wait_for_shard()
        self._write_configs()
        if source is not None:
            copy_tokenizer_files(source.shards.directory, self.folder)
        self._move_into_place(self._name_shards())

    def discard(self) -> None:
        """Remove the files of an unfinished export, this one or an earlier one."""
        self._threads.shutdown()
        discard_staging_folder(self.directory)

    def _append(self, named: dict[str, torch.Tensor]) -> None:
        if self._nonfinite is not None:
            return
        if not self._allows_nonfinite and (name := first_nonfinite(named)) is not None:
            self._nonfinite = name
            self._shard = {}
            self.discard()
            return
        for name, value in to_disk(self.model, named).items():
            first, *others = self._names.get(name) or [name]
            self._put(first, value.contiguous())
            for other in others:  # a tied parameter: tensors in a file share no memory
                self._put(other, value.clone())

    def _put(self, name: str, value: torch.Tensor) -> None:
        if self._shard and self._shard_size + value.nbytes > self.shard_bytes:
            self._flush()
        self._shard[name] = value
        self._shard_size += value.nbytes

    def _copy_untouched(self, source: CheckpointSource) -> None:
        replaced = {part for name in self._written for part in source.made_from(name)}
        weights = {  # not buffers: masks may well be infinite, and have dtypes that mean something
            part: torch.float32 if name in self._fp32 else self.dtype
            for name in self._shapes
            for part in source.made_from(name)
        }
        untouched = [name for name in source.shards.tensors if name not in replaced]
        for name in untouched:
            value = source.shards.read(name)
            if not self._allows_nonfinite and name in weights and first_nonfinite({name: value}) is not None:
                self.discard()
                raise NonFiniteWeights(name)
            # A compressed tensor is written dequantized: the configuration says nothing of compression any more.
            dtype = weights.get(name, self.dtype if name in source.shards.compressed else value.dtype)
            self._put(name, value.to(dtype))
        if untouched:
            try:
                source.shards.watched.check()
            except UserError:
                self.discard()
                raise

    def _flush(self) -> None:
        if not self._shard:
            return
        self._wait_for_shard()
        self._shards += 1
        self._writing = self._threads.submit(save_tensors, self.folder / f"shard-{self._shards}", self._shard)
        self._shard_of.update(dict.fromkeys(self._shard, self._shards))
        self._total_size += self._shard_size
        self._shard = {}
        self._shard_size = 0

    def _wait_for_shard(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _name_shards(self) -> list[str]:
        """Give files their final names, and write the index if there are several; return the names in moving order."""
        names = [
            f"model-{number:05d}-of-{self._shards:05d}.safetensors" for number in range(1, self._shards + 1)
        ]
        names = [SINGLE] if self._shards == 1 else names
        for number, name in enumerate(names, start=1):
            with described("writing", self.folder):
                os.replace(self.folder / f"shard-{number}", self.folder / name)
        if names == [SINGLE]:
            return names
        index = {
            "metadata": {"total_parameters": self._parameters, "total_size": self._total_size},
            "weight_map": {name: names[number - 1] for name, number in sorted(self._shard_of.items())},
        }
        replace_file(self.folder / INDEX, json.dumps(index, indent=2) + "\n")
        return [*names, INDEX]

    def _write_configs(self) -> None:
        self.config.dtype = self.dtype
        if not self.config.architectures or type(self.model).__name__ not in self.config.architectures:
            self.config.architectures = [type(self.model).__name__]
        with described("writing", self.folder / "config.json"):
            self.config.save_pretrained(self.folder)
            self._keep_older_names(self.folder / "config.json")
        if self.model.can_generate():
            # Not save_pretrained: it refuses generation configs that the hub is full of.
            self.model.generation_config.to_json_file(self.folder / GENERATION)

    def _keep_older_names(self, file: Path) -> None:
        """Add what the source's configuration says of rotary embeddings in names of transformers 4, whose programs
        would take their defaults without them; unless transformers 5 then reads something else."""
        older = None if self._source is None else self._source.shards.directory / "config.json"
        if older is None or not older.is_file():
            return
        text = file.read_text()
        fields = json.loads(text)
        source = json.loads(read_text_file(older))
        for part, before in ((fields, source), (fields.get("text_config"), source.get("text_config"))):
            if isinstance(part, dict) and isinstance(before, dict):
                part |= {name: before[name] for name in _OLDER_ROPE if name in before and name not in part}
        expected = type(self.config).from_pretrained(file.parent).to_dict()
        replace_file(file, json.dumps(fields, indent=2, sort_keys=True) + "\n")
        if type(self.config).from_pretrained(file.parent).to_dict() != expected:
            replace_file(file, text)

    def _move_into_place(self, weights: list[str]) -> None:
        # An older checkpoint's entry points go first, so that its index never points at new shards.
        with described("reading", self.directory):
            old = [
                self.directory / SINGLE,
                self.directory / INDEX,
                *self.directory.glob("model-*-of-*.safetensors"),
            ]
        if self._source is not None:  # an earlier template would win over that in tokenizer_config.json
            old.append(self.directory / CHAT_TEMPLATE)
        move_into_place(self.directory, old, last=weights)


def _untied(config: PreTrainedConfig, model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without tied parameters, and change ``config`` to its configuration."""
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    untied = build_meta_model(config, dtype=model.dtype)
    tied = next((names for names in parameter_names(untied) if len(names) > 1), None)
    if tied is not None:
        raise UserError(
            f"Adapters of {tied[0]} cannot be merged: {type(model).__name__} always uses that weight as {tied[1]} too, "
            "which they do not change."
        )
    return untied


def copy_tokenizer_files(source: Path, folder: Path) -> None:
    """Copy a checkpoint's tokenizer, chat templates and processor into a folder whose files are moved into place
    later."""
    for path in tokenizer_files(source):
        copy_into(folder, path)


def digest_of(file: Path) -> str:
    """Return a hash of a file's content."""
    with described("reading", file), file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:32]


def write_template(folder: Path, template: str | Mapping[str, str]) -> None:
    """Make a chat template, or several by name, the only ones in a folder with the files of a tokenizer."""
    for old in [path for pattern in TEMPLATE_FILES for path in folder.glob(pattern)]:
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for name, text in ({"default": template} if isinstance(template, str) else template).items():
        file = folder / CHAT_TEMPLATE if name == "default" else folder / OTHER_TEMPLATES / f"{name}.jinja"
        file.parent.mkdir(exist_ok=True)
        replace_file(file, text)
    config = folder / "tokenizer_config.json"
    fields = json.loads(read_text_file(config)) if config.is_file() else {}
    if "chat_template" in fields:  # which llama.cpp's converter takes before the files above
        value: Any = template
        if isinstance(template, Mapping):
            value = [{"name": name, "template": text} for name, text in template.items()]
        replace_file(
            config, json.dumps(fields | {"chat_template": value}, indent=2, ensure_ascii=False) + "\n"
        )


def tokenizer_files(source: Path) -> list[Path]:
    """Return a directory's tokenizer, chat templates, and processor."""
    return sorted({path for pattern in TOKENIZER_FILES for path in source.glob(pattern)})
