"""Paths inside vLLM that several probes read; a tuple holds the places of one file over releases, newest first."""

UTILS = "vllm/v1/spec_decode/utils.py"
V2_SPECULATOR = "vllm/v1/worker/gpu/spec_decode/dflash/speculator.py"
GATING = (
    "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
    "vllm/model_executor/layers/fla/ops/fused_sigmoid_gating.py",
)
CONV = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
V1, V2 = "copy_and_expand_dflash_inputs_kernel", "prepare_dflash_inputs"
MAMBA = "vllm/v1/worker/mamba_utils.py"
HYBRID = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
POSTCOPY = "postprocess_mamba_fused_kernel"
REJECTION = "vllm/v1/sample/rejection_sampler.py"
FLASHINFER = "vllm/v1/attention/backends/flashinfer.py"
ATTENTION_BACKEND = "vllm/v1/attention/backend.py"
ATTENTION_UTILS = "vllm/v1/attention/backends/utils.py"
HOST_BUFFERS = "vllm/v1/utils.py"
DRAFTER = ("vllm/v1/spec_decode/llm_base_proposer.py", "vllm/v1/spec_decode/eagle.py")
WORKER_UTILS = "vllm/v1/worker/utils.py"
TORCH_UTILS = "vllm/utils/torch_utils.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
BATCH = "vllm/v1/worker/gpu_input_batch.py"
GDN = "vllm/v1/attention/backends/gdn_attn.py"
CACHE = "vllm/config/cache.py"
CACHE_MODES = "MambaCacheMode"
