"""The MTP draft loop: a plan is overwritten in its page-locked buffer before its copy has run."""

from specmortem.exposure import (
    ASYNC,
    DRAFT_LOOP,
    FLASHINFER,
    HYBRID,
    NOT_ASYNC,
    PLANS,
    V1,
    V2,
    Rule,
    drafts,
)
from specmortem.incident import Incident, Probe
from specmortem.upstream import vllm_files as files

_BUILDER_FILES = (
    (files.FLASHINFER,),
    (files.ATTENTION_BACKEND,),
    (files.ATTENTION_UTILS,),
    (files.HOST_BUFFERS,),
)
_BUILDER = (
    "FlashInferMetadataBuilder._compute_flashinfer_kv_metadata",
    "CommonAttentionMetadata",
    "split_decodes_and_prefills",
    "CpuGpuBuffer",
)
_POSITIONS = "SpecDecodeBaseProposer._get_positions"  # not propose, whose closure is most of vLLM
_UPLOAD = ((files.TORCH_UTILS, "async_tensor_h2d"),)

INCIDENT = Incident(
    slug="mtp-draft-loop",
    package=__name__,
    shown="by released code, and as an illegal address on whole vLLM 0.24.0 under a load made for it",
    probes=(
        Probe(
            "plan-staging-reuse",
            "a plan is overwritten in its page-locked buffer before its copy has run",
            (*_BUILDER_FILES, files.DRAFTER),
            (*_BUILDER, _POSITIONS),
            packages=("vllm", "flashinfer"),
        ),
        Probe(
            "builder-staging-reuse",
            "row pointers are overwritten in their page-locked buffer before their copy has run",
            _BUILDER_FILES,
            _BUILDER,
        ),
        Probe(
            "zeroer-staging-reuse",
            "block ids to zero are overwritten in their page-locked buffer before their copy has run",
            ((files.WORKER_UTILS,),),
            ("KVBlockZeroer.zero_block_ids",),
            also=_UPLOAD,
        ),
        Probe(
            "host-lengths-counted-twice",
            "lengths on the host grow by two in a draft pass, those on the device by one",
            ((files.RUNNER,), files.DRAFTER, (files.UTILS,), *_BUILDER_FILES),
            # statements of the runner's methods are run, without what these lift
            ("", _POSITIONS, "eagle_step_update_slot_mapping_and_metadata", *_BUILDER),
            also=_UPLOAD,
            needs="interpreter",
        ),
    ),
    exposure={
        "plan-staging-reuse": Rule(
            (V1, DRAFT_LOOP, drafts(3), FLASHINFER, PLANS), "with 3 drafts rarely", "crash"
        ),
        "builder-staging-reuse": Rule((V1, DRAFT_LOOP, drafts(2), FLASHINFER, PLANS), effect="drafts"),
        "host-lengths-counted-twice": Rule(
            (V1, DRAFT_LOOP, drafts(2), NOT_ASYNC, FLASHINFER, PLANS),
            "a step that scheduled no drafts for any request, or disable_padded_drafter_batch; and a batch that is "
            "not padded for a CUDA graph",
            "drafts",
        ),
        "zeroer-staging-reuse": Rule((V2, HYBRID, ASYNC), "blocks handed out in two steps in a row"),
    },
)
