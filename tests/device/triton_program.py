"""A Triton kernel launched through a device: `python triton_program.py sim|cuda`."""

import sys

import torch
import triton
import triton.language as tl

from specmortem import device


@triton.jit
def shift_kernel(out, source, by, n, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    value = tl.load(source + index, mask=index < n)
    tl.store(out + index, value + by, mask=index < n)


def shift(out: torch.Tensor, source: torch.Tensor, by: int) -> None:
    shift_kernel[(1,)](out, source, by, out.numel(), BLOCK=4)


def main(kind: str) -> None:
    dev = device.open(kind, schedule="lazy")
    source, out = dev.tensor([1, 2, 3], torch.int32), dev.full([3], 1, torch.int32)
    host = dev.host_buffer([3], torch.int32)
    shift(dev.zeros([3], torch.int32), source, 10)
    dev.synchronize()
    with dev.capture() as graph:
        dev.launch(shift, out, source, 10, reads=[source], writes=[out])
    dev.copy_async(host, out)
    dev.synchronize()
    print("before", host[:].tolist())
    graph.replay()
    dev.copy_async(host, out)
    dev.synchronize()
    print("after", host[:].tolist())


if __name__ == "__main__":
    main(sys.argv[1])
