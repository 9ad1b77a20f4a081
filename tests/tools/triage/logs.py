"""Logs and reports in the formats of the field, all of them made up."""

DFLASH = """\
(APIServer pid=11) INFO 03-04 10:00:01 [loggers.py:257] Engine 000: Avg prompt throughput: 300.0 tokens/s, \
Avg generation throughput: 20.0 tokens/s, Running: 24 reqs, Waiting: 0 reqs, GPU KV cache usage: 6.1%
(EngineCore pid=12) ERROR 03-04 10:00:09 [dump_input.py:72] Dumping input data for V1 LLM engine (v0.22.1) with \
config: model='Qwen/Qwen3.5-4B', speculative_config=SpeculativeConfig(method='dflash', num_spec_tokens=15)
[rank0]:[E304 10:00:09.100000001 ProcessGroupNCCL.cpp:2119] [PG ID 2 PG GUID 3 Rank 0] Process group watchdog \
thread terminated with exception: CUDA error: an illegal memory access was encountered
(EngineCore pid=12) ERROR 03-04 10:00:10 [core.py:1238] EngineDeadError: EngineCore encountered an issue.
"""
MTP = """\
vllm serve Qwen/Qwen3.5-4B --max-model-len 8192 --max-num-seqs 32 --attention-backend FLASHINFER \
--speculative-config '{"method": "mtp", "num_speculative_tokens": 5, "attention_backend": "FLASHINFER"}'
INFO 03-04 10:00:00 [core.py:93] Initializing a V1 LLM engine (v0.22.1) with config: ...
RuntimeError: CUDA error: an illegal memory access was encountered
NVRM: Xid (PCI:0000:0a:00): 31, pid=7, MMU Fault: Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ
Two streams crash within a minute, one request at a time is clean.
--no-async-scheduling still crashes.
"""
PIPELINE = """\
vLLM 0.31.0, V2 model runner, 2x H100
vllm serve Qwen/Qwen3.5-4B --pipeline-parallel-size 2 --max-num-seqs 8 --mamba-cache-mode align \
--enable-prefix-caching --speculative-config '{"method":"mtp","num_speculative_tokens":3}'
INFO 03-04 10:00:00 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 1.00, Accepted: 0 tokens, \
Drafted: 480 tokens, Avg Draft acceptance rate: 0.0%
One of two concurrent requests repeats the same token until it is cut off. HTTP 200, nothing is logged.
"""
COUNTS = """\
vLLM 0.23.0 with Qwen3.5, MTP n=3, async scheduling on, prefix caching off.
Under concurrent load some answers are garbled and end early; there is no crash.
With --no-async-scheduling the answers are clean.
"""
RESUME = """\
vLLM 0.27.1, V2 GPU runner, 1x RTX 3090, Qwen3.5
--block-size 64 --enable-prefix-caching --mamba-cache-mode align --max-num-seqs 4
INFO 03-04 10:00:00 [interface.py:9] Setting attention block size to 1600 tokens
The second turn of the same prefix dies: CUDA error: an illegal memory access was encountered
CUDA Exception: Warp Illegal Address
#0  precopy_mamba_align_fused_kernel<<<(1,9,4),(128,1,1)>>> ()
"""
NO_DRAFTER = """\
vLLM 0.11.0, 8x H100, TP=8, no speculative config
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
"""
OUT_OF_MEMORY = """\
INFO 03-04 10:00:00 [core.py:93] Initializing a V1 LLM engine (v0.23.0) with config: method='mtp'
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.
"""
INCIDENTS = {
    "dflash-oob": DFLASH,
    "mtp-draft-loop": MTP,
    "pp-align-copy": PIPELINE,
    "async-accepted-counts": COUNTS,
}
