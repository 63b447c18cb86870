import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.store.layout import ALIGNMENT, LARGEST_UNIT, Layout, pieces

MIB = 1 << 20
SIZES = [1, 199, 4095, 4096, 4097, 3 * MIB, 4 * MIB, 4 * MIB + 1, 13 * MIB + 17, 41 * MIB]
directory_counts = st.sampled_from([1, 2, 3, 5])
sizes = st.sampled_from(SIZES) | st.integers(1, 50 * MIB)


@settings(deadline=None)
@given(
    directory_counts,
    st.lists(st.tuples(st.sampled_from(["weights.0", "weights.1", "scratch"]), sizes), max_size=12),
)
def test_extents_are_page_aligned_and_never_overlap(directories, requests):
    layout = Layout(directories)
    taken = {}
    for file, nbytes in requests:
        extent = layout.allocate(file, nbytes)
        assert extent.nbytes == nbytes
        assert extent.offset % ALIGNMENT == 0
        assert extent.unit % ALIGNMENT == 0
        assert 0 < extent.unit <= LARGEST_UNIT
        assert extent.offset >= taken.get(file, 0)
        for piece in pieces(extent, directories, 0, nbytes):
            whole = -(-piece.nbytes // ALIGNMENT) * ALIGNMENT  # a tail is written as a whole page
            assert piece.offset >= extent.offset
            taken[file] = max(taken.get(file, 0), piece.offset + whole)
        # Not a page more than needed in the fullest directory
        assert taken[file] == layout.file_bytes()[file]


@pytest.mark.parametrize("directories", [1, 2, 3, 5])
@pytest.mark.parametrize("nbytes", SIZES)
def test_small_extents_use_all_directories_that_they_have_pages_for(directories, nbytes):
    extent = Layout(directories).allocate("weights.0", nbytes)
    used = {piece.directory for piece in pieces(extent, directories, 0, nbytes)}
    pages = -(-nbytes // ALIGNMENT)
    assert len(used) >= min(directories, pages) - 1  # rounding units up to pages may leave out the last one
    assert len(used) == directories or nbytes < directories * directories * ALIGNMENT


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../weights", "store.json", "manifest.json", "x.tmp", "a\0b"]
)
def test_file_names_that_leave_the_directory_or_collide_are_rejected(name):
    with pytest.raises(ValueError, match="plain name"):
        Layout(1).allocate(name, 1)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_empty_extents_are_rejected(nbytes):
    with pytest.raises(ValueError, match="at least one byte"):
        Layout(1).allocate("weights.0", nbytes)
