import pytest
import torch

from specmortem import device
from specmortem.errors import BadInputError
from specmortem.incidents.async_accepted_counts.engine.graph_metadata import GraphMetadata


def build(rows, requests, padded, max_num_seqs=8, capture=None, k=3):
    dev = device.open("sim", schedule="immediate")
    graph = GraphMetadata(dev, max_num_seqs, k, capture)
    for buffer in graph.buffers:
        buffer.fill_(1)  # what an earlier, larger batch left
    indices = torch.arange(1, 1 + requests * (1 + k), dtype=torch.int32).reshape(requests, 1 + k)
    counts = torch.full((requests,), 2, dtype=torch.int32)
    return graph.build(rows, indices, counts, padded)


def shapes(views):
    return [tuple(view.shape) for view in views]


def test_shapes_by_tokens_and_by_requests():
    assert shapes(build("per-token", 2, 2)) == [(8, 4), (8,), (9,), (8,)]
    assert shapes(build("per-request", 2, 2)) == [(2, 4), (2,), (3,), (2,)]
    assert build("per-token", 3, 4).num_accepted.shape == (16,)
    assert build("per-request", 3, 4).num_accepted.shape == (4,)


@pytest.mark.parametrize("rows", ["per-token", "per-request"])
def test_rows_behind_the_requests_are_null_and_empty(rows):
    indices, masks, starts, counts = build(rows, 3, 4)
    assert masks.tolist() == [True] * 3 + [False] * (len(masks) - 3)
    assert indices[:3].flatten().tolist() == list(range(1, 13)) and not indices[3:].any()
    assert starts.tolist() == [0, 4, 8, *[12] * (len(starts) - 3)]
    assert counts.tolist() == [2, 2, 2, *[1] * (len(counts) - 3)]


def test_slices_by_tokens_end_silently_where_the_tensors_do():
    assert shapes(build("per-token", 4, 4, capture=8)) == [(8, 4), (8,), (9,), (8,)]


def test_more_requests_than_rows_are_refused():
    with pytest.raises(BadInputError, match="5 requests in a graph for 4"):
        build("per-request", 5, 4)
    with pytest.raises(BadInputError, match="tensors of 4 rows"):
        build("per-request", 5, 5, capture=4)
