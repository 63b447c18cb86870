"""Files that mean harm, or make no sense: one message each, and never more memory or another file than they are."""

import contextlib
import dataclasses
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.options.command import parse_command_line
from common.data.read import read_records
from common.errors import FinetuneError, UserError
from common.files import preset_files
from common.models.checkpoint.shards import INDEX, Shards
from common.models.presets import load_config
from common.store import Layout, StoreError
from common.store.checksums import ChecksummedExtent
from common.store.directories import FORMAT, IDENTITY_FILE, Identity
from common.store.manifest import write_sealed
from fcdp.planner.cluster import load_cluster
from fuyou.checkpoint.commits import FORMAT as STATE_FORMAT
from fuyou.checkpoint.commits import TrainingState
from tests.common.data.conftest import write_records

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def layout() -> dict:
    whole = Layout(2)
    whole.allocate("weights.0", 10_000)
    whole.allocate("weights.0", 20_000_000)
    return whole.to_dict()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@settings(max_examples=100)
@given(field=st.sampled_from(["store", "index", "count", "complete", "layout", "more"]), value=anything)
def test_an_identity_of_any_content_is_taken_or_rejected(place: Path, field: str, value: object) -> None:
    content = {"format": FORMAT, "store": "x", "index": 1, "count": 2, "complete": True, "layout": layout()}
    write_sealed(place / IDENTITY_FILE, content | {field: value})
    try:
        identity = Identity.read(place)
    except FinetuneError:
        return
    assert identity is not None and identity.layout == Layout.from_dict(layout())


@pytest.mark.parametrize(
    "extent",
    [
        [0, 1 << 62, 4096],
        [0, -1, 4096],
        [4096, 10, 4096],
        [0, 10, 0],
        [0, 10, 1 << 40],
        [0, 10, 100],
        [0, 1.5, 4096],
    ],
)
@pytest.mark.parametrize("name", ["weights.0", "../weights", "/etc/passwd", "..", ""])
def test_absurd_extents_and_names_are_rejected(place: Path, extent: list, name: str) -> None:
    described = {"directories": 1, "files": {name: [extent]}}
    content = {"format": FORMAT, "store": "x", "index": 0, "count": 1, "complete": True, "layout": described}
    write_sealed(place / IDENTITY_FILE, content)
    with pytest.raises(StoreError, match="does not describe a store"):
        Identity.read(place)


@settings(max_examples=100)
@given(field=st.sampled_from(["what", "extent", "sums"]), value=anything)
def test_a_checksum_of_any_content_is_taken_or_rejected(field: str, value: object) -> None:
    good = {"what": "head, parameters", "extent": ["weights.0", 0, 4096, 4096], "sums": ["00ff"]}
    try:
        sealed = ChecksummedExtent.from_dict({**good, field: value})
    except (TypeError, ValueError, KeyError):
        return
    assert isinstance(hash(sealed.extent), int) and all(isinstance(number, int) for number in sealed.sums)


def test_a_state_of_an_older_version_is_rejected_with_both_numbers() -> None:
    older = TrainingState(3, 1, "id", "model", "bf16", "fp32").to_dict() | {"format": STATE_FORMAT - 1}
    with pytest.raises(
        UserError, match=f"format {STATE_FORMAT - 1}; this version reads format {STATE_FORMAT}"
    ):
        TrainingState.from_dict(older)


def test_a_state_of_a_version_that_trained_selected_experts_or_kept_a_single_slot() -> None:
    """It is read if the run did neither: then one field was empty, and the other 2."""
    state = TrainingState(3, 1, "id", "model", "bf16", "fp32")
    assert TrainingState.from_dict(state.to_dict() | {"experts": None, "slots": 2, "torn": False}) == state
    with pytest.raises(UserError, match="keeps a single slot"):
        TrainingState.from_dict(state.to_dict() | {"slots": 1})
    with pytest.raises(UserError, match="This run trains selected experts"):
        TrainingState.from_dict(state.to_dict() | {"experts": {"model.layers.0.mlp.experts": [1]}})


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "a/../../b"])
def test_an_index_names_files_of_the_same_directory_only(tmp_path: Path, file: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": file}}))
    with pytest.raises(FinetuneError, match="not the name of a file in this directory"):
        Shards(tmp_path)


def test_a_header_is_read_up_to_the_formats_limit(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate(2 << 30)  # sparse
    with pytest.raises(FinetuneError, match="damaged"):
        Shards(tmp_path)


LINE = '{"text": "hello"}\n'


@pytest.mark.parametrize(("bad", "what"), [
    (b"[" * 200_000, "line 3"),
    (b'{"text": ' + b"9" * 5000 + b"}", "line 3"),
    (b'{"text": "\xff"}', "line 3"),
    (b"{}{}", "line 3"),
    (b"null", "line 3"),
], ids=["deep", "digits", "not UTF-8", "two", "null"])  # fmt: skip
def test_a_broken_line_is_named(tmp_path: Path, bad: bytes, what: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(LINE.encode() * 2 + bad + b"\n" + LINE.encode())
    with pytest.raises(UserError, match=what) as caught:
        list(read_records(file))
    assert str(file) in str(caught.value)


@settings(max_examples=30, deadline=None)
@given(
    content=st.binary(max_size=80),
    kind=st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet"]),
)
def test_data_files_of_any_content_are_read_or_rejected_by_name(
    place: Path, content: bytes, kind: str
) -> None:
    file = place / f"data{kind}"
    file.write_bytes(content)
    try:
        records, said = [record.values for record in read_records(file)], str(file)
    except UserError as error:
        records, said = [], str(error)
    assert str(file) in said and all(isinstance(record, dict) for record in records)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet"]))
def test_damaged_data_files_are_read_or_rejected_by_name(place: Path, data: st.DataObject, kind: str) -> None:
    """Good files, in which some bytes are others, missing, or too many."""
    file = place / f"good{kind}"
    if kind == ".txt":
        file.write_text("One é.\n\nTwo.\n" * 5)
    else:
        write_records(file, [{"text": f'Text {i}, "é"\n', "more": str(i)} for i in range(8)])
    content = file.read_bytes()
    start = data.draw(st.integers(0, len(content) - 1))
    length = data.draw(st.sampled_from([0, 1, 1, 8, len(content)]))
    file.write_bytes(content[:start] + data.draw(st.binary(max_size=4)) + content[start + length :])
    try:
        records, said = [record.values for record in read_records(file)], str(file)
    except UserError as error:
        records, said = [], str(error)
    assert str(file) in said and all(isinstance(record, dict) for record in records)


def _is_decided(read: Callable[[], object]) -> None:
    """Taken, or refused with a message for users: anything else is raised."""
    with contextlib.suppress(FinetuneError, click.UsageError):
        read()


SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "head_dim",
)


@settings(max_examples=60, deadline=None)
@given(
    changed=st.dictionaries(
        st.sampled_from([*SIZES, "model_type", "hidden_act", "rope_parameters", "tie_word_embeddings", "pad_token_id"]),
        anything | st.sampled_from([0, -1, 1 << 40, 1 << 70]), min_size=1, max_size=3,
    ),
    cut=st.none() | st.integers(0, 100),
)  # fmt: skip
def test_a_checkpoints_configuration_of_any_content_is_taken_or_rejected(
    place: Path, changed: dict, cut: int | None
) -> None:
    """And takes no memory, however large it says it is."""
    good = {
        "model_type": "llama",
        **dict.fromkeys(SIZES, 2),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    (place / "config.json").write_text(json.dumps({**good, **changed})[:cut])
    _is_decided(lambda: load_config(place))


CLUSTER = tomllib.loads(preset_files("clusters")["a100-ib"].read_text())


@settings(max_examples=60, deadline=None)
@given(
    changed=st.dictionaries(st.sampled_from(sorted(CLUSTER)), anything, min_size=1, max_size=2),
    level=st.none() | st.tuples(st.sampled_from(sorted(CLUSTER["level"][0])), anything),
)
def test_a_clusters_profile_of_any_content_is_taken_or_rejected(
    place: Path, changed: dict, level: tuple[str, object] | None
) -> None:
    facts = {**CLUSTER, **changed}
    if level is not None:
        facts["level"] = [{**CLUSTER["level"][0], level[0]: level[1]}, *CLUSTER["level"][1:]]
    (place / "profile.json").write_text(json.dumps(facts))
    _is_decided(lambda: load_cluster(str(place / "profile.json")))
    with patch("fcdp.planner.cluster.tomllib.loads", lambda text: facts):  # JSON says more than TOML can
        (place / "cluster.toml").touch()
        _is_decided(lambda: load_cluster(str(place / "cluster.toml")))


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet='[]{}="a.#\\n1\\u0000-', max_size=30) | st.just("a = " + "[" * 100_000))
def test_a_preset_or_file_of_options_of_any_text_is_taken_or_rejected(place: Path, text: str) -> None:
    (place / "cluster.toml").write_text(text)
    _is_decided(lambda: load_cluster(str(place / "cluster.toml")))
    (place / "options.toml").write_text(text)
    _is_decided(lambda: parse_command_line(["--config", str(place / "options.toml"), "--model", "llama-10m"]))


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(["steps", "ssd", "lr", "training", "memory", "save", "nothing"]), value=anything)
def test_options_in_a_file_of_any_value_are_taken_or_rejected(place: Path, key: str, value: object) -> None:
    (place / "options.toml").touch()
    with patch("cli.options.config_file.tomllib.loads", lambda text: {key: value}):
        _is_decided(
            lambda: parse_command_line(["--config", str(place / "options.toml"), "--model", "llama-10m"])
        )


def test_a_damaged_parquet_file_is_named_with_the_last_record_that_is_good(tmp_path: Path) -> None:
    file, records = tmp_path / "data.parquet", [{"text": f"record {i}"} for i in range(9)]
    write_records(file, records)  # three in each group of rows, which is checked as a whole
    content = bytearray(file.read_bytes())
    place = content.rfind(b"record 4")
    content[place - 40 : place - 1] = bytes(39)
    file.write_bytes(content)
    seen: list[dict] = []
    with pytest.raises(UserError, match=r"data\.parquet cannot be read") as caught:
        seen.extend(record.values for record in read_records(file))
    assert seen == records[: len(seen)] and len(seen) < 4
    assert (f"after record {len(seen)}:" in str(caught.value)) == bool(seen)


@settings(max_examples=100)
@given(field=st.sampled_from([item.name for item in dataclasses.fields(TrainingState)]), value=anything)
def test_a_state_with_any_field_is_taken_or_rejected(field: str, value: object) -> None:
    """A manifest that was edited, and sealed again."""
    content = TrainingState(3, 1, "id", "model", "bf16", "fp32").to_dict()
    try:
        state = TrainingState.from_dict({**content, field: value})
    except FinetuneError:
        return
    assert isinstance(state.step, int) and isinstance(state.user, dict) and sum(state.missed.values()) >= 0


@pytest.mark.parametrize(("field", "value"), [
    ("step", "7"), ("step", -1), ("step", 7.5), ("slot", 2), ("slot", "x"), ("random", [1]), ("user", 5),
    ("report", {"loss": "x"}), ("report", 7), ("clipped", "x"), ("missed", {"a": "b"}), ("missed", [1]),
    ("micro_batch", ["a"]), ("dtype", 7), ("checksums", {}), ("piece_bytes", -5),
])  # fmt: skip
def test_a_state_with_a_wrong_type_is_named(field: str, value: object) -> None:
    content = TrainingState(3, 1, "id", "model", "bf16", "fp32").to_dict()
    with pytest.raises(FinetuneError, match=f"manifest has {field} = "):
        TrainingState.from_dict({**content, field: value})
