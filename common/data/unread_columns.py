"""Columns of records that nothing here reads: they are counted, or refused where other tools train by them."""

from collections.abc import Iterable, Iterator
from typing import Any

from common.data.examples import WHOLE, ItemKind, objects_read
from common.data.messages import LOSS_SWITCHES, parsed
from common.data.read import DataRecord
from common.data.selection import Counts
from common.errors import UserError

# TRL 1.16: SFTTrainer, DPOTrainer, RewardTrainer, and their earlier names
_TOKENS = (
    "input_ids", "labels", "attention_mask", "position_ids", "completion_mask", "assistant_masks", "seq_lengths",
    "prompt_ids", "completion_ids", "chosen_ids", "rejected_ids", "shift_labels", "prompt_input_ids",
    "chosen_input_ids", "rejected_input_ids", "chosen_labels", "rejected_labels",
)  # fmt: skip
# TRL's DPOTrainer and KTOTrainer
_REFERENCES = (
    "ref_chosen_logps", "ref_rejected_logps", "reference_chosen_logps", "reference_rejected_logps", "ref_logps",
    "reference_logps",
)  # fmt: skip
# Columns with turns, and keys of the parts of their contents that are read, and of images
_TURNS = (*WHOLE, "prompt", "completion", "chosen", "rejected", "preferred_output", "non_preferred_output")
_PART = ("type", "text", "value")
_IMAGE = {"image", "path", "url", "image_url", "bytes"}
_NOTHING: tuple[Any, ...] = (None, "", [])
_KTO = ("label", "kto_tag")  # TRL, axolotl, and ms-swift; LLaMA-Factory


def noted(records: Iterable[DataRecord], counts: Counts, kind: ItemKind | None) -> Iterator[DataRecord]:
    """Yield records, and count the columns that nothing reads.

    Args:
        kind: what the items are; None: documents and conversations.

    Raises:
        UserError: one of these columns changes the training in another tool.
    """
    for record in records:
        for inside, values, read in objects_read(record.values, kind):
            for name, value in values.items():
                if name not in read and value not in _NOTHING:
                    if why := _refusal(name, value, kind):
                        raise UserError(f"{record.where} has {name!r}{inside}, which is not read here: {why}")
                    counts.add_unread(f"{name[:40]!r}{inside}")
                elif name in _TURNS:
                    for key in _keys_of_parts(
                        parsed(value) if name in WHOLE and isinstance(value, str) else value
                    ):
                        counts.add_unread(f"{key[:40]!r} of parts")
        for name, value in record.replaced.items():
            if value not in _NOTHING:
                counts.add_unread(repr(name[:40]))
        yield record


def _keys_of_parts(turns: Any) -> Iterator[str]:
    """Yield the keys of parts of contents, and of their images, that nothing reads."""
    for turn in turns if isinstance(turns, list) else [turns]:
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        images = [image for part in parts for image in part.values() if isinstance(image, dict)]
        for part in parts + [image for image in images if _IMAGE.intersection(image)]:
            known = {*_PART, *_IMAGE, str(part.get("type"))}
            yield from (str(key) for key, value in part.items() if key not in known and value not in _NOTHING)


def _refusal(name: str, value: Any, kind: ItemKind | None) -> str:
    """Return why a column is refused, empty if it may be there."""
    if name in (*LOSS_SWITCHES, "weight", "sample_weight"):
        return 'all records weigh alike. Leave it out, or give turns without loss "weight": 0.'
    if name == "segments" and isinstance(value, list):  # axolotl, prompt_strategies/input_output.py
        return 'leave it out, and write its texts as turns, with "weight": 0 where "label" is false.'
    if name == "type" and value in ("TEXT_TO_VALUE", "VALUE_TO_TEXT"):  # NeMo, gpt_sft_chat_dataset.py
        return "labels of turns are not trained on. Leave it out, and write them into the turns' contents."
    if name in _TOKENS and isinstance(value, list):
        return "texts are tokenized here. Leave out what another tool has made of them."
    if name in _REFERENCES:
        return "the reference is computed here. Leave it out."
    if name in _KTO and kind is None and (isinstance(value, bool) or str(value).lower() in ("true", "false")):
        return "answers are all taken as good ones. Leave out records with bad answers, and then this column."
    return ""
