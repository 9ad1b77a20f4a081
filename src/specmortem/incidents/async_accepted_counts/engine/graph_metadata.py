"""What a captured decode reads about its requests: persistent tensors, padded to the size of the graph.

State indices, masks, query starts and accepted counts have one row a request. A full graph is captured for a number of
*tokens*, and that is padded: 72 requests with 3 drafts make 288. Up to 0.23.0 the tensors were sliced to the tokens
(vllm/v1/attention/backends/gdn_attn.py:412 in 0.23.0), which adds rows that no request has; since 0.24.0 to the
requests (416). The rows added name the null block, have length 0 and a count of 1. Nothing is known to have come of
them but the work of filling them: `metadata` of this incident's arms runs both kernels over them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from specmortem.device import Device
from specmortem.errors import BadInputError

Rows = Literal["per-token", "per-request"]
NULL_BLOCK = 0
ROWS: dict[str, Rows] = {"before": "per-token", "after": "per-request"}


class SpecMetadata(NamedTuple):
    """Views of the persistent tensors; B is their number of rows."""

    state_indices: torch.Tensor  # int32 [B, 1 + K]
    masks: torch.Tensor  # bool [B]
    query_start_loc: torch.Tensor  # int32 [B + 1]
    num_accepted: torch.Tensor  # int32 [B]


class GraphMetadata:
    """The tensors of every decode graph, at the addresses that the graphs were captured with."""

    def __init__(
        self, device: Device, max_num_seqs: int, k: int, max_capture_size: int | None = None
    ) -> None:
        self.device, self.k = device, k
        rows = max_num_seqs * (1 + k)
        self.max_rows = rows if max_capture_size is None else min(rows, max_capture_size)
        self.buffers = SpecMetadata(
            device.zeros((self.max_rows, 1 + k), torch.int32, name="spec_state_indices_tensor"),
            device.zeros((self.max_rows,), torch.bool, name="spec_sequence_masks"),
            device.zeros((self.max_rows + 1,), torch.int32, name="spec_query_start_loc"),
            device.full((self.max_rows,), 1, torch.int32, name="num_accepted_tokens"),
        )

    def build(
        self, rows: Rows, state_indices: torch.Tensor, num_accepted: torch.Tensor, padded_reqs: int
    ) -> SpecMetadata:
        """Metadata of N decodes, state_indices int32 [N, 1 + K], in a graph for `padded_reqs` requests.

        Slices end silently where the tensors do, as they do in the release. Raises BadInputError when there are more
        requests than the graph is for, or than the tensors have rows.
        """
        requests = state_indices.shape[0]
        if not requests <= padded_reqs or requests > self.max_rows:
            raise BadInputError(
                f"{requests} requests in a graph for {padded_reqs} and tensors of {self.max_rows} rows"
            )
        size = padded_reqs * (1 + self.k) if rows == "per-token" else padded_reqs
        own = self.buffers
        views = SpecMetadata(
            own.state_indices[:size],
            own.masks[:size],
            own.query_start_loc[: size + 1],
            own.num_accepted[:size],
        )
        self.device.launch(_fill, *views, state_indices, num_accepted, writes=views, name="graph metadata")
        return views


def _fill(
    indices: torch.Tensor,
    masks: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    state_indices: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    """Rows of requests, then padding: null blocks, no mask, length 0, and a count of 1."""
    n, tokens = state_indices.shape
    indices[:n], counts[:n] = state_indices, num_accepted
    indices[n:], counts[n:] = NULL_BLOCK, 1
    masks[:n], masks[n:] = True, False
    starts[: n + 1] = torch.arange(n + 1, device=starts.device) * tokens
    starts[n + 1 :] = n * tokens
