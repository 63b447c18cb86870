"""Conversations with images: however a file puts them, they become rows with the right labels and pixels."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("PIL", reason="pip install 'fuyou[images]'")

from common.data import DataConfig
from common.data.images import ImageBatches, any_images, has_images, open_image_data, with_images
from common.data.messages import messages_of
from common.data.processor import load_processor
from common.errors import UserError
from tests.common.data.processors import REWRITING_TEMPLATE, TEMPLATE, chat, draw, make_processor, write

ASK = {"type": "text", "text": "What is the capital of France?"}


def opened(
    files: Sequence[Path], folder: Path, seq_len: int = 128, template: str | None = None
) -> ImageBatches:
    processor = make_processor() if template is None else make_processor(template)
    config = DataConfig(tuple(map(str, files)), seq_len, 2, shuffle=False)
    return open_image_data(config, processor, folder / "cache")


def images_of(record: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    messages = messages_of(record["messages"], "messages", "here")
    return with_images(messages, record.get("images"), "here", folder)


def test_all_ways_of_putting_an_image_give_the_same_conversation(tmp_path: Path) -> None:
    path = draw(tmp_path / "a picture.png", 0)
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    parts: list[Any] = [
        {"type": "image", "path": "a picture.png"},
        {"type": "image", "url": str(path)},
        {"type": "image", "image": path.as_uri()},
        {"type": "image_url", "image_url": {"url": "a picture.png"}},
    ]
    expected = [
        {"role": "user", "content": [{"type": "image", "url": str(path)}, ASK]},
        {"role": "assistant", "content": [{"type": "text", "text": "Paris"}]},
    ]
    for part in parts:
        record = chat([part, ASK], "Paris")
        assert has_images(record)
        assert images_of(record, tmp_path) == expected
    for content in ([{"type": "image"}, ASK], "<image>" + ASK["text"]):
        record = {**chat(content, "Paris"), "images": ["a picture.png"]}
        assert has_images(record) and images_of(record, tmp_path) == expected
    record = chat([{"type": "image_url", "image_url": {"url": url}}, ASK], "Paris")
    assert images_of(record, tmp_path)[0]["content"][0] == {"type": "image", "url": url}
    record = {
        **chat("<image>" + ASK["text"], "Paris"),
        "images": [{"bytes": path.read_bytes(), "path": None}],
    }
    embedded = images_of(record, tmp_path)[0]["content"][0]["url"]
    assert base64.b64decode(embedded.partition(",")[2]) == path.read_bytes()


@pytest.mark.parametrize(("record", "match"), [
    (chat([{"type": "image", "path": "gone.png"}], "x"), "here: there is no image .*gone.png"),
    (chat([{"type": "image", "url": "https://a/b.png"}], "x"), "nothing is downloaded: give a local file"),
    (chat([{"type": "image"}], "x"), "more places for images in its messages than images"),
    ({**chat("hello", "x"), "images": ["a", "b"]}, "has 2 more images than places for them in its messages"),
    (chat([{"type": "video", "path": "a.mp4"}], "x"), "a part of type 'video' cannot be trained on"),
    (chat([{"type": "image", "image": 3}], "x"), "an image is given as int"),
    (chat([{"type": "image", "path": "a.png", "max_pixels": 9}], "x"), "has 'max_pixels', and the checkpoint's"),
    (chat([{"type": "image_url", "image_url": {"url": "a.png", "resized_height": 9}}], "x"), "has 'resized_height'"),
])  # fmt: skip
def test_what_is_wrong_with_a_record_is_reported(record: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match):
        images_of(record, tmp_path)


def test_gray_images_of_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    """Pillow, and so every processor, makes white of what is above 255."""
    import numpy as np
    from PIL import Image

    for number, values in enumerate((np.uint16([[0, 300]]), np.int32([[0, 300]]), np.float32([[0, 300]]))):
        file = tmp_path / f"{number}.tiff"
        Image.fromarray(values).save(file)
        url = "data:image/tiff;base64," + base64.b64encode(file.read_bytes()).decode()
        for image in (file.name, url, {"bytes": file.read_bytes()}):
            with pytest.raises(UserError, match=r"here: .* has more than 8 bits per pixel"):
                images_of({**chat("<image>", "x"), "images": [image]}, tmp_path)
    Image.fromarray(np.uint8([[0, 255]])).save(tmp_path / "gray.png")
    assert images_of({**chat("<image>", "x"), "images": ["gray.png"]}, tmp_path)


def test_every_layout_of_conversations_may_hold_images(tmp_path: Path) -> None:
    """LLaVA's among them; next to them, conversations without images keep their texts."""
    draw(tmp_path / "0.png", 0)
    turns = [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cat."}]
    image, plain = {"image": "0.png"}, [{"from": "human", "value": "Who?"}, turns[1]]
    records = [
        {"conversations": turns, **image, "system": "Be kind."},
        {"messages": json.dumps(turns), **image, "system": "Be kind."},
        {"prompt": "<image>What is it?", "completion": [{"role": "assistant", "content": "A cat."}], **image},
        {"instruction": "<image>What is it?", "output": "A cat.", **image},
        {"conversations": plain},
    ]
    batches = opened([write(tmp_path / "data.jsonl", *records)], tmp_path)
    tokenizer, rows = (
        make_processor().tokenizer,
        [row for step in range(3) for row in batches.batch(step)["input_ids"]],
    )
    first, second, third, fourth, last = (
        tokenizer.decode(row[row != tokenizer.pad_token_id]) for row in rows[:5]
    )
    assert first == second == third.replace("<s>", "<s><|turn|>system\nBe kind.</s>\n", 1)
    assert (
        third == fourth
        and "<img>" in third
        and third.endswith("What is it?</s>\n<|turn|>assistant\nA cat.</s>\n")
    )
    assert last == "<s><|turn|>user\nWho?</s>\n<|turn|>assistant\nA cat.</s>\n"
    for wrong, match in (
        ({"text": "hello", "images": ["0.png"]}, "line 1 is not a conversation"),
        ({"conversations": plain, "videos": ["a.mp4"], **image}, "line 1 has 'videos'"),
        ({"conversations": turns, "images": ["0.png"], **image}, "line 1 has images in 'images' and 'image'"),
    ):
        with pytest.raises(UserError, match=match):
            opened([write(tmp_path / "wrong.jsonl", wrong)], tmp_path)


def test_tokens_that_the_model_does_not_know(tmp_path: Path) -> None:
    draw(tmp_path / "0.png", 0)
    data, processor = (
        write(tmp_path / "a.jsonl", chat([{"type": "image", "path": "0.png"}], "<eoi>")),
        make_processor(),
    )
    size = processor.tokenizer.convert_tokens_to_ids("<eoi>")
    config = DataConfig((str(data),), 64, 1, vocab_size=size)
    with pytest.raises(UserError, match=rf"line 1: '<eoi>' is token {size}, and the model knows"):
        open_image_data(config, processor, tmp_path / "cache")


def test_rows_are_what_the_processor_makes_of_each_conversation(tmp_path: Path) -> None:
    for number in range(3):
        draw(tmp_path / f"{number}.png", number)
    first = chat([{"type": "image", "path": "0.png"}, ASK], "Paris")
    second = chat(
        [{"type": "image", "path": "1.png"}, {"type": "image", "path": "2.png"}, ASK],
        "Paris Paris",
        "?",
        "Yes",
    )
    data = write(tmp_path / "data.jsonl", first, chat("Thank you!", "The lazy dog"), second)
    batches = opened([data], tmp_path)
    assert (batches.rows, batches.steps_per_epoch, batches.seq_len) == (3, 2, 128)
    processor = make_processor()
    batch = batches.batch(0)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape == (2, 128)
    assert batch["pixel_values"][1] is None and batch["pixel_values"][0].shape == (1, 3, 16, 16)
    assert batches.batch(1)["pixel_values"][0].shape == (2, 3, 16, 16)
    for step, row, turns in ((0, 0, ["Paris"]), (0, 1, ["The lazy dog"]), (1, 0, ["Paris Paris", "Yes"])):
        batch = batches.batch(step)
        ids, labels, mask = (batch[name][row] for name in ("input_ids", "labels", "attention_mask"))
        trained = processor.tokenizer.decode(labels[labels != -100])
        assert trained == "".join(f"{turn}</s>\n" for turn in turns)
        assert torch.equal(labels[labels != -100], ids[labels != -100])
        assert (
            not mask[int(mask.sum()) :].any()
            and (ids[int(mask.sum()) :] == processor.tokenizer.pad_token_id).all()
        )
    images = int((batch["input_ids"][0] == processor.tokenizer.image_token_id).sum())
    assert images == 8 and int(batch["token_type_ids"][0].sum()) == 8
    assert "3 conversations with 3 images" in batches.description
    assert all(torch.equal(batch[name], batches.batch(1)[name]) for name in ("input_ids", "labels"))


def test_a_turn_that_is_rendered_again_makes_a_separate_row(tmp_path: Path) -> None:
    draw(tmp_path / "0.png", 0)
    data = write(
        tmp_path / "data.jsonl", chat([{"type": "image", "path": "0.png"}, ASK], "Paris", "Sure?", "Yes")
    )
    batches = opened([data], tmp_path, template=REWRITING_TEMPLATE)
    assert batches.rows == 2
    batch, tokenizer = batches.batch(0), make_processor().tokenizer
    said = [tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert said == ["Paris</s>\n", "Yes</s>\n"]
    assert all(pixels.shape == (1, 3, 16, 16) for pixels in batch["pixel_values"])


def test_what_does_not_fit_is_left_out_and_counted(tmp_path: Path) -> None:
    draw(tmp_path / "0.png", 0)
    image = {"type": "image", "path": "0.png"}
    data = write(
        tmp_path / "data.jsonl", chat([image], "yes"), chat([image], "long " * 40), chat([image, ASK])
    )
    batches = opened([data], tmp_path, seq_len=64)
    assert batches.rows == 1
    assert f"first {data}, line 2; longer than a row" in batches.description
    assert f"first {data}, line 3; no completion, output or message of the assistant" in batches.description
    with pytest.raises(
        UserError, match=r"no token to train on in .*left out: 1 record, .*longer than a row of 8"
    ):
        opened([write(tmp_path / "long.jsonl", chat([image], "yes"))], tmp_path, seq_len=8)
    assert [file.suffix for file in (tmp_path / "cache").iterdir() if file.suffix in (".lines", ".tmp")] == []


def test_prepared_data_are_used_again_and_checked(tmp_path: Path) -> None:
    picture = draw(tmp_path / "0.png", 0)
    data = write(tmp_path / "data.jsonl", chat([{"type": "image", "path": "0.png"}, ASK], "Paris"))
    digest = opened([data], tmp_path).digest
    index = next((tmp_path / "cache").glob("images-*.tokens"))
    written = index.stat().st_mtime_ns
    again = opened([data], tmp_path)
    assert (again.digest, index.stat().st_mtime_ns) == (digest, written)
    content = picture.read_bytes()
    picture.write_bytes(b"no picture")
    with pytest.raises(
        UserError, match=r"line 1: the image .*0.png has changed since the data were prepared"
    ):
        again.batch(0)
    picture.write_bytes(content)
    assert opened([data], tmp_path).digest == digest
    for at in (20, -20):  # a row, and the counts behind all rows
        damaged = bytearray(index.read_bytes())
        damaged[at] ^= 1
        index.write_bytes(damaged)
        assert opened([data], tmp_path).digest == digest and index.read_bytes() != damaged, (
            "damaged, and not made again"
        )


def test_images_that_changed_are_other_data(tmp_path: Path) -> None:
    """Also where the file of the data has not, by edits, exchanges, and links; another time alone is nothing."""
    first, second = draw(tmp_path / "0.png", 0), draw(tmp_path / "1.png", 1)
    records = [chat([{"type": "image", "path": f"{number}.png"}, ASK], "Paris") for number in range(2)]
    data = write(tmp_path / "data.jsonl", *records)
    batches = opened([data], tmp_path)
    digest = batches.digest
    first.touch()
    assert opened([data], tmp_path).digest == digest

    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    with pytest.raises(UserError, match=r"line 1: the image .*0.png has changed .* or begin a new run"):
        batches.batch(0)
    swapped = opened([data], tmp_path)
    swapped.batch(0)
    assert swapped.digest != digest

    first.unlink()
    first.symlink_to(second)
    linked = opened([data], tmp_path)
    assert linked.digest not in (digest, swapped.digest)
    draw(second, 2)
    with pytest.raises(UserError, match="has changed since the data were prepared"):
        linked.batch(0)
    opened([data], tmp_path).batch(0)


def test_files_with_images_are_distinguished_from_others(tmp_path: Path) -> None:
    draw(tmp_path / "0.png", 0)
    with_image = write(
        tmp_path / "with.jsonl", chat("no", "x"), chat([{"type": "image", "path": "0.png"}], "x")
    )
    without = write(tmp_path / "without.jsonl", {"text": 'the word "image" alone'}, chat("hello", "x"))
    table = pa.Table.from_pylist([{**chat("<image>", "x"), "images": [{"bytes": b"1", "path": None}]}])
    pq.write_table(table, tmp_path / "with.parquet")
    pq.write_table(pa.Table.from_pylist([chat("hello", "x")]), tmp_path / "without.parquet")
    (tmp_path / "list.json").write_text(json.dumps([{**chat("<image>", "x"), "images": ["0.png"]}]))
    for name, found in {
        "with.jsonl": True,
        "with.parquet": True,
        "list.json": True,
        "without.parquet": False,
    }.items():
        assert any_images((str(tmp_path / name),)) is found, name
    assert not any_images((str(without),))
    assert any_images((str(without), str(with_image)))


def test_a_checkpoint_without_a_processor_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no processor that transformers can load"):
        load_processor(tmp_path)
    make_processor().save_pretrained(tmp_path / "good")
    assert type(load_processor(tmp_path / "good")).__name__ == "Gemma3Processor"
    make_processor().tokenizer.save_pretrained(tmp_path / "text")
    with pytest.raises(UserError, match="has no processor that transformers can load"):
        load_processor(tmp_path / "text")


def test_tools_reach_the_template_and_unknown_roles_are_rejected(tmp_path: Path) -> None:
    draw(tmp_path / "0.png", 0)
    image = {"type": "image", "path": "0.png"}
    template = "{% if tools %}{{ tools | length }}{{ tools[0].function.name }}{% endif %}" + TEMPLATE
    records = [chat([image], "yes"), {**chat([image], "yes"), "tools": [{"name": "look"}]}]
    batches = opened([write(tmp_path / "data.jsonl", *records)], tmp_path, template=template)
    plain, with_tools = (make_processor().tokenizer.decode(ids) for ids in batches.batch(0)["input_ids"])
    assert "1look" in with_tools and "1look" not in plain
    wrong = chat([image], "yes")
    wrong["messages"][1]["role"] = "gtp"
    with pytest.raises(
        UserError, match=r"line 1: turn 2 of 'messages' has the role 'gtp'.* Did you mean 'gpt'"
    ):
        opened([write(tmp_path / "wrong.jsonl", wrong)], tmp_path)


def test_long_conversations_end_behind_the_last_answer_that_fits(tmp_path: Path) -> None:
    draw(tmp_path / "0.png", 0)
    turns = ([{"type": "image", "path": "0.png"}], "yes", "And?", "no", "And?", "long " * 40)
    data = write(tmp_path / "data.jsonl", chat(*turns))
    batches = opened([data], tmp_path, seq_len=64)
    batch, tokenizer = batches.batch(0), make_processor().tokenizer
    assert tokenizer.decode(batch["labels"][0][batch["labels"][0] != -100]) == "yes</s>\nno</s>\n"
    assert "cut: 1 record, " in batches.description and f"first {data}, line 1; longer" in batches.description
    config = DataConfig((str(data),), 64, 1, truncate=False)
    with pytest.raises(UserError, match=r"no token to train on in .*truncate=False"):
        open_image_data(config, make_processor(), tmp_path / "cache")


def test_turns_of_weight_0_are_not_trained_on(tmp_path: Path) -> None:
    draw(tmp_path / "0.png", 0)
    record = chat([{"type": "image", "path": "0.png"}], "yes", "And?", "no")
    record["messages"][1]["weight"] = 0
    batch = opened([write(tmp_path / "data.jsonl", record)], tmp_path).batch(0)
    assert make_processor().tokenizer.decode(batch["labels"][0][batch["labels"][0] != -100]) == "no</s>\n"


def test_images_of_an_answer_carry_no_loss(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", 0)
    answer = [
        {"type": "text", "text": "Here: "},
        {"type": "image", "path": "a.png"},
        {"type": "text", "text": " done"},
    ]
    file = write(tmp_path / "chats.jsonl", chat("Draw a cat.", answer), chat("And a dog?", "No."))
    batches = opened([file], tmp_path)
    batch = batches.batch(0)
    image = make_processor().tokenizer.image_token_id
    assert (batch["input_ids"] == image).sum() == 4
    assert not (batch["labels"] == image).any()
    assert batches.trainable_tokens == (batch["labels"] != -100).sum()
    (row,) = [row for row in range(2) if (batch["input_ids"][row] == image).any()]
    ids = batch["input_ids"][row]
    last = int((ids == image).nonzero().max())
    assert (batch["labels"][row, last + 1 :] == ids[last + 1 :])[
        batch["attention_mask"][row, last + 1 :] == 1
    ].all()
