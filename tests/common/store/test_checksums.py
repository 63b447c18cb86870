import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.store import ALIGNMENT, Layout, Store, StoreError
from common.store.checksums import ChecksummedExtent, ExtentChecksums, checksum
from common.store.store import verify
from tests.common.store.conftest import noise

MASK = (1 << 64) - 1


def plain_mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def plain_checksum(data: bytes, first_page: int) -> int:
    """The definition, in whole numbers of Python."""
    step, total = 0x9E3779B97F4A7C15, 0
    for page in range(0, len(data), ALIGNMENT):
        value = 0
        for place in range(512):
            word = int.from_bytes(data[page + 8 * place : page + 8 * place + 8], "little")
            value += word * (plain_mix((place + 1) * step & MASK) | 1)
        total += plain_mix((value + plain_mix((first_page + page // ALIGNMENT) * step & MASK)) & MASK)
    return total & MASK


@pytest.mark.parametrize("nbytes", [1, 8, 4095, 4096, 4097, 3 * 4096])
def test_is_what_the_definition_says(nbytes: int) -> None:
    data = noise(nbytes, seed=nbytes)
    padded = data.tobytes().ljust(-(-nbytes // ALIGNMENT) * ALIGNMENT, b"\0")
    assert checksum(data, 7) == plain_checksum(padded, 7)


@pytest.mark.parametrize("nbytes", [1, 4096, 300 * 4096 + 8])
def test_a_device_computes_the_same(nbytes: int) -> None:
    data = noise(nbytes, seed=nbytes)
    assert checksum(torch.from_numpy(data), 7) == checksum(data, 7)


@settings(deadline=None)
@given(
    bit=st.integers(0, 3 * ALIGNMENT * 8 - 1),
    others=st.sets(st.integers(0, 3 * ALIGNMENT * 8 - 1), max_size=3),
)
def test_flipped_bits_show(bit: int, others: set[int]) -> None:
    data = noise(3 * ALIGNMENT)
    whole = checksum(data, 0)
    for flipped in {bit} | others:
        data[flipped // 8] ^= 1 << flipped % 8
    assert checksum(data, 0) != whole


@pytest.mark.parametrize("change", ["swap pages", "swap words", "move", "stale half"])
def test_what_drives_do_wrong_shows(change: str) -> None:
    data, other = noise(4 * ALIGNMENT), noise(4 * ALIGNMENT, seed=1)
    whole = checksum(data, 0)
    changed, first = data.copy(), 0
    if change == "swap pages":
        changed[:ALIGNMENT], changed[ALIGNMENT : 2 * ALIGNMENT] = (
            data[ALIGNMENT : 2 * ALIGNMENT],
            data[:ALIGNMENT],
        )
    elif change == "swap words":
        changed[:8], changed[8:16] = data[8:16], data[:8]
    elif change == "move":
        first = 1
    else:
        changed[2 * ALIGNMENT :] = other[2 * ALIGNMENT :]
    assert checksum(changed, first) != whole


@settings(deadline=None, max_examples=20)
@given(nbytes=st.integers(1, 40 * ALIGNMENT), directories=st.integers(1, 4), data=st.data())
def test_any_pieces_give_the_checksums_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, nbytes: int, directories: int, data: st.DataObject
) -> None:
    paths = [tmp_path_factory.mktemp("ssd") for _ in range(directories)]
    layout = Layout(directories)
    layout.allocate("weights.0", 5000)
    extent = layout.allocate("weights.0", nbytes)
    content = noise(nbytes)
    cuts = data.draw(st.sets(st.integers(1, max(1, nbytes // ALIGNMENT))))
    edges = [0, *sorted(cut * ALIGNMENT for cut in cuts if cut * ALIGNMENT < nbytes), nbytes]
    with Store.create(paths, layout, io="posix") as store:
        ends = [edge for edge in edges[1:-1] if data.draw(st.booleans())] + [nbytes]
        written = ExtentChecksums(extent, store.directories, "it", ends)
        parts = data.draw(st.permutations(list(itertools.pairwise(edges))))
        left = data.draw(st.sets(st.sampled_from(parts)))  # what nothing is written to
        for a, b in left:
            content[a:b] = 0
            store.leave_zeros(extent, a, b - a, written)
        for future in [
            store.write(extent, content[a:b], a, b - a, written) for a, b in parts if (a, b) not in left
        ]:
            future.result()
        checked = written.checked()
        sealed = ChecksummedExtent(checked.what, extent, checked.sums)
        again = ChecksummedExtent.from_dict(json.loads(json.dumps(sealed.to_dict())))
        assert (again.what, again.extent) == (sealed.what, sealed.extent)
        np.testing.assert_array_equal(again.sums, sealed.sums, strict=True)
        assert verify(store, [sealed]) == (nbytes, [])
        at = data.draw(st.integers(0, nbytes - 1))
        stripe, skip = divmod(at, extent.unit)
        row, directory = divmod(stripe, directories)
        with open(paths[directory] / "weights.0", "r+b") as file:
            file.seek(extent.offset + row * extent.unit + skip)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 16]))
        _, (damage,) = verify(store, [sealed])
        assert str(paths[directory] / "weights.0") in damage
        assert not any(str(path) in damage for path in paths if path != paths[directory])
        buffer = np.empty(nbytes, np.uint8)
        with pytest.raises(StoreError, match=r"it is damaged.*resume"):
            store.read(checked, buffer).result()
        for start, end in itertools.pairwise([0, *ends]):  # each part alone: the others are whole
            assert checked.covering(start, 1) == checked.covering(start, end - start) == (start, end)
            part = buffer[: end - start]
            if start <= at < end:
                with pytest.raises(StoreError, match="it is damaged"):
                    store.read(checked, part, start, end - start).result()
                continue
            store.read(checked, part, start, end - start).result()
            np.testing.assert_array_equal(part, content[start:end])
        if nbytes > 1:
            with pytest.raises(ValueError, match="not whole parts"):
                store.read(checked, buffer, 0, nbytes - 1)


def test_an_unreadable_drive_is_damage_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(1)
    extent = layout.allocate("weights.0", 5000)
    with Store.create([tmp_path], layout, io="posix") as store:
        monkeypatch.setattr(
            store, "read_unchecked", lambda *_: (_ for _ in ()).throw(StoreError("the drive is gone"))
        )
        assert verify(store, [ChecksummedExtent("it", extent, np.zeros((1, 1), np.uint64))]) == (
            5000,
            ["the drive is gone"],
        )
