"""Where documents lie in packed rows."""

import torch

from common.data import Documents, restarts
from common.data.documents import current_documents, separate_documents


def test_documents_begin_where_positions_do_not_go_up_by_one() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [3, 4, 0, 1, 2, 7]])
    documents = Documents.of(positions)
    assert documents is not None and (documents.rows, documents.length) == (3, 6)
    spans = [(0, 0, 3), (0, 3, 4), (0, 4, 6), (1, 0, 6), (2, 0, 2), (2, 2, 5), (2, 5, 6)]
    assert list(documents.spans()) == spans
    assert restarts(positions) and not restarts(positions[1:2])


def test_rows_of_one_document_have_none_to_keep_apart() -> None:
    assert Documents.of(torch.arange(4).expand(2, -1) + 5) is None
    assert Documents.of(None) is None and not restarts(None)
    assert Documents.of(torch.zeros(3, 2, 4, dtype=torch.long)) is None  # of images: three dimensions


def test_documents_are_at_work_inside_the_context_only() -> None:
    documents = Documents.of(torch.tensor([[0, 0]]))
    with separate_documents(documents):
        assert current_documents() is documents
        with separate_documents(None):
            assert current_documents() is None
        assert current_documents() is documents
    assert current_documents() is None
