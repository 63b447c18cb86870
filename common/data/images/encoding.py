"""Encode conversations with images as token ids and tensors of pixels, with the family's own processor."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import ProcessorMixin

from common.data.encoding.chat_template import ChatTemplate
from common.data.encoding.encoder import check_vocabulary
from common.data.encoding.fitting import AnswerFinder
from common.data.selection import Tally
from common.data.shapes import Chat
from common.errors import FinetuneError, UserError


@dataclass(frozen=True)
class ImageRow:
    """A conversation of a data set: the processor's input, and which tokens of the result are trained on."""

    messages: list[dict[str, Any]]  # Messages, in the form of :func:`common.data.images.content.with_images`
    trained: list[tuple[int, int]]  # Ranges of tokens that carry loss
    tokens: int
    where: str  # File and line
    options: dict[str, Any]  # Other arguments of the chat template
    cut: int = 0  # Number of tokens that were cut off behind these

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that carry loss."""
        return sum(stop - start for start, stop in self.trained)


def load_processor(checkpoint: Path) -> ProcessorMixin:
    """Return the processor of a vision-language checkpoint, which makes token ids and pixels of conversations.

    Raises:
        UserError: if transformers cannot load one here, or it has no chat template.
    """
    from transformers import AutoProcessor

    advice = ""
    try:
        processor = AutoProcessor.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
        if not isinstance(processor, ProcessorMixin):
            raise OSError("no processor_config.json or preprocessor_config.json")
    except Exception as error:  # each class of processors fails in its own way
        if "orchvision" in str(error) or "PIL" in str(error) or "Pillow" in str(error):
            advice = " Install what it needs: pip install 'fuyou[images]'."
        raise UserError(
            f"{checkpoint} has no processor that transformers can load, and data with images need one: {error}{advice}"
        ) from error
    if not (getattr(processor, "chat_template", None) or processor.tokenizer.chat_template):
        raise UserError(f"The processor of {checkpoint} has no chat template, and data with images need one.")
    return processor


def processor_identity(processor: ProcessorMixin) -> str:
    """Return text that changes with all that decides a processor's tokens and pixels, its tokenizer apart."""
    return json.dumps([type(processor).__name__, processor.to_json_string(), processor.chat_template], default=str)


class ImageEncoder:
    """Runs a processor on single conversations.

    Args:
        vocab_size: number of tokens that the model knows; None: it is not checked.
    """

    def __init__(self, processor: ProcessorMixin, vocab_size: int | None = None) -> None:
        self._processor, self._vocab_size = processor, vocab_size
        self._template = ChatTemplate(processor)

    def rows(self, chat: Chat, limit: int | None = None, drop_unseen: Tally | None = None) -> list[ImageRow]:
        """Return the rows of a conversation, one as a rule, with the tokens that carry loss.

        Some templates render a turn differently once others follow. Such a conversation becomes one row per answer,
        each as the model will see it.

        Args:
            limit: number of tokens; a longer conversation ends behind the last answer within them, if there is one.
            drop_unseen: counts conversations with text that the template leaves out; None: they are an error.

        Raises:
            UserError: if an image cannot be read, or the template refuses the conversation or leaves text out.
        """
        seen, form = self._template.checked(chat, drop_unseen)
        if seen is None:
            return []
        chat = seen
        finder = AnswerFinder(lambda messages, options, ask=False: self._ids(messages, chat, ask))
        opened = replace(chat, messages=self._opened(chat.messages, chat.where))
        whole = self._ids(opened.messages, chat)
        image_id = getattr(self._processor, "image_token_id", None)  # of images, no embedding is read
        check_vocabulary(
            (token for token in whole if token != image_id), self._vocab_size, self._processor.tokenizer, chat.where
        )

        def row(count: int, spans: list[tuple[int, int]], tokens: int) -> ImageRow:
            return ImageRow(chat.messages[:count], spans, tokens, chat.where, chat.options)

        spans = finder.spans(opened, whole, chat.answers) if form.is_whole else None
        if spans is None:
            rows = []
            for turn in chat.answers:
                ids = self._ids(opened.messages[: turn + 1], chat)
                rows.append(row(turn + 1, [(finder.start(opened, turn, ids), len(ids))], len(ids)))
            return rows
        fitting = [number for number, span in enumerate(spans) if limit is not None and span[1] <= limit]
        if limit is None or len(whole) <= limit or not fitting:
            return [row(len(opened.messages), spans, len(whole))]
        last = fitting[-1]
        kept = row(chat.answers[last] + 1, spans[: last + 1], spans[last][1])
        return [replace(kept, cut=len(whole) - kept.tokens)]

    def tensors(self, row: ImageRow) -> dict[str, torch.Tensor]:
        """Return the processor's values for a row, each ``[1, tokens]`` or of its images; and ``labels``.

        Raises:
            FinetuneError: if an image has changed since the data were prepared.
        """
        made = self._process(self._opened(row.messages, row.where), row.where, row.options)
        ids = made["input_ids"]
        if ids.shape[1] != row.tokens:
            raise FinetuneError(
                f"{row.where} had {row.tokens} tokens when the data were prepared and has {ids.shape[1]} now: its "
                "images have changed. Put them back, or start a new run."
            )
        made["labels"] = torch.full_like(ids, -100)
        for start, stop in row.trained:
            made["labels"][:, start:stop] = ids[:, start:stop]
        return made

    def _ids(self, messages: list[dict[str, Any]], chat: Chat, ask: bool = False) -> list[int]:
        return self._process(messages, chat.where, chat.options, ask)["input_ids"][0].tolist() if messages else []

    def _process(
        self, messages: list[dict[str, Any]], where: str, options: dict[str, Any], ask: bool = False
    ) -> dict[str, torch.Tensor]:
        try:
            made: Any = self._processor.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=ask, **options
            )
        except Exception as error:  # templates and processors raise any exception
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(
                f"{where}: the checkpoint's processor refuses this conversation (roles {roles}): {error}"
            ) from error
        return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}

    def _opened(self, messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
        opened = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                message = {**message, "content": [self._open(part, where) for part in content]}
            opened.append(message)
        return opened

    @staticmethod
    def _open(part: dict[str, Any], where: str) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        from transformers.image_utils import load_image

        try:
            return {"type": "image", "image": load_image(part["url"])}
        except Exception as error:  # Pillow raises many kinds
            raise UserError(f"{where}: the image {part['url'][:80]} cannot be read: {error}") from error
