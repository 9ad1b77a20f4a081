"""A small align-mode batch for the released mamba copy kernels: two request slots, one conv and one temporal state."""

from dataclasses import dataclass, field

import torch

BLOCKS, COLUMNS, CONV_WIDTH, INNER, TEMPORAL = 12, 5, 4, 8, 16


@dataclass
class AlignBatch:
    columns: int = COLUMNS
    block_table: torch.Tensor = field(init=False)
    conv: torch.Tensor = field(init=False)
    temporal: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.block_table = torch.zeros(2, self.columns, dtype=torch.int32)
        self.block_table[:, :COLUMNS] = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
        self.conv = torch.rand(BLOCKS, CONV_WIDTH, INNER)
        self.temporal = torch.rand(BLOCKS, TEMPORAL)
        self.tables = torch.tensor([self.block_table.data_ptr()])
        self.bases = torch.tensor([self.conv.data_ptr(), self.temporal.data_ptr()])

    def owners(self) -> list[int]:
        return [-1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1]

    def metadata(self) -> list:
        return [
            self.tables,
            self.block_table.stride(0),
            self.bases,
            torch.tensor([t.stride(0) * t.element_size() for t in (self.conv, self.temporal)]),
            torch.tensor([4, 4], dtype=torch.int32),
            torch.tensor([INNER, TEMPORAL]),
            torch.tensor([CONV_WIDTH, 0], dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int64),
        ]


def watch_align(watch, batch, of, state_names=("conv", "temporal")) -> None:
    watch.rows(batch.block_table, of=of, name="block_table", owner_name="request")
    watch.blocks(batch.conv, batch.owners(), of=of, name=state_names[0])
    watch.blocks(batch.temporal, batch.owners(), of=of, name=state_names[1])
    watch.pointers(batch.tables, batch.block_table, name="block_table_ptrs")
    watch.pointers(batch.bases, batch.conv, batch.temporal, name="state_base_addrs")


def precopy(kernel, batch, idx_mapping, src_col, dst_col, bias) -> None:
    kernel[(len(idx_mapping), 2, 1)](
        torch.tensor(dst_col, dtype=torch.int32),
        torch.tensor(src_col, dtype=torch.int32),
        torch.tensor(bias, dtype=torch.int32),
        *batch.metadata(),
        torch.tensor(idx_mapping, dtype=torch.int32),
        len(idx_mapping),
        COPY_BLOCK_SIZE=32,
        CONV_STATE_DIM_FIRST=False,
    )


def postprocess(kernel, batch, idx_mapping, accepted, state_idx, computed, block_size=8) -> None:
    counts = torch.tensor(accepted, dtype=torch.int32)
    kernel[(len(idx_mapping), 2, 1)](
        counts,
        torch.tensor(state_idx, dtype=torch.int32),
        None,
        torch.tensor(computed, dtype=torch.int32),
        None,
        *batch.metadata(),
        counts,
        torch.tensor(idx_mapping, dtype=torch.int32),
        len(idx_mapping),
        block_size=block_size,
        COPY_BLOCK_SIZE=32,
        CONV_STATE_DIM_FIRST=False,
        HAS_IDX_MAPPING=True,
        PRECOMPUTED_NEW_COMPUTED=True,
    )
