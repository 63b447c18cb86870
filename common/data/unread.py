"""Columns of records that nothing here reads: they are counted, or refused where other tools train by them."""

from collections.abc import Iterable, Iterator
from typing import Any

from common.data.messages import LOSS_SWITCHES
from common.data.read import DataRecord
from common.data.selection import Counts
from common.data.shapes import columns_read
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
_KTO = ("label", "kto_tag")  # TRL, axolotl, and ms-swift; LLaMA-Factory


def noted(records: Iterable[DataRecord], counts: Counts, kind: str | None) -> Iterator[DataRecord]:
    """Yield records, and count the columns that nothing reads.

    Args:
        kind: what the items are, ``pairs`` or ``texts``; None: documents and conversations.

    Raises:
        UserError: one of these columns changes the training in another tool.
    """
    for record in records:
        read = columns_read(record.values, kind)
        for name, value in record.values.items():
            if name not in read and value not in (None, "", []):
                if why := _refusal(name, value, kind):
                    raise UserError(f"{record.where} has {name!r}, which is not read here: {why}")
                counts.add_unread(repr(name[:40]))
        yield record


def _refusal(name: str, value: Any, kind: str | None) -> str:
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
