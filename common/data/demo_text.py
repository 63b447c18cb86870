"""Make data for a run without downloads: English text that ships with Python, and a tokenizer trained on it."""

from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_END = "<|end|>"
_START = "<|start|>"
_PAD = "<|pad|>"
_TURN = "<|turn|>"

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|turn|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)


def demo_documents() -> list[str]:
    """Return the chapters of Python's help system: half a megabyte of English."""
    return [topics[name] for name in sorted(topics)]


def train_demo_tokenizer(vocab_size: int, directory: Path) -> None:
    """Train a byte-level BPE tokenizer of ``vocab_size`` tokens, 260 at least, and save it in a directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_PAD, _START, _END, _TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(demo_documents(), trainer)
    # Offsets keep leading spaces: with them trimmed, the template's marks would miss words.
    keep_offsets = processors.ByteLevel(trim_offsets=False)
    start = [(_START, tokenizer.token_to_id(_START))]
    begin = processors.TemplateProcessing(single=f"{_START} $A", pair=f"{_START} $A $B", special_tokens=start)
    tokenizer.post_processor = processors.Sequence([keep_offsets, begin])
    special = {"bos_token": _START, "eos_token": _END, "pad_token": _PAD, "chat_template": _CHAT_TEMPLATE}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    directory.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(directory)
