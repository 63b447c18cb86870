"""Make data for a run without downloads: English text that ships with Python, and a tokenizer trained on it."""

import ast
import functools
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_MODULES = (  # names, separated by spaces
    "abc argparse ast asyncio.base_events asyncio.streams asyncio.tasks base64 bisect calendar cmd codecs collections "
    "concurrent.futures._base configparser contextlib copy csv ctypes dataclasses datetime decimal difflib doctest "
    "email.message enum fileinput fractions ftplib functools gettext glob gzip heapq http.client http.server imaplib "
    "importlib._bootstrap inspect ipaddress json json.decoder json.encoder locale logging logging.config "
    "logging.handlers lzma mailbox mimetypes multiprocessing.connection multiprocessing.managers multiprocessing.pool "
    "numbers optparse os pathlib pdb pickle pickletools platform plistlib poplib pprint pydoc random "
    "re sched selectors shelve shlex shutil smtplib socket socketserver sqlite3 ssl statistics string subprocess "
    "tarfile tempfile textwrap threading timeit tokenize traceback turtle types typing unittest.case unittest.mock "
    "urllib.parse urllib.request urllib.robotparser uuid warnings wave weakref webbrowser xml.dom.minidom "
    "xml.etree.ElementTree xmlrpc.client zipfile"
)

_SHORTEST_DOCUMENT = 200

_END, _START, _PAD, _TURN = "<|end|>", "<|start|>", "<|pad|>", "<|turn|>"

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|turn|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)


@functools.cache
def demo_documents() -> tuple[str, ...]:
    """Return the chapters of Python's help system and longer docstrings of its library: a megabyte of English."""
    return (*_help_topics(), *(text for module in _MODULES.split() for text in _docstrings(module)))


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
    keep_offsets, start = processors.ByteLevel(trim_offsets=False), [(_START, tokenizer.token_to_id(_START))]
    begin = processors.TemplateProcessing(single=f"{_START} $A", pair=f"{_START} $A $B", special_tokens=start)
    tokenizer.post_processor = processors.Sequence([keep_offsets, begin])
    special = {"bos_token": _START, "eos_token": _END, "pad_token": _PAD, "chat_template": _CHAT_TEMPLATE}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    directory.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(directory)


def _help_topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return []
    return [topics[name] for name in sorted(topics)]


def _docstrings(module: str) -> list[str]:
    base = Path(sysconfig.get_path("stdlib"), *module.split("."))
    source = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
    if source is None:  # not in this version of Python
        return []
    tree = ast.parse(source.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for text in texts if len(text) >= _SHORTEST_DOCUMENT]
