"""Asynchronous scheduling: a request starts from another's accepted count."""

from specmortem.exposure import (
    ALIGN,
    ASYNC,
    CONCURRENT,
    COUNTS,
    FULL_GRAPHS,
    HYBRID,
    NOT_ALIGN,
    SPECULATION,
    V1,
    Rule,
)
from specmortem.incident import Campaign, Incident, Probe
from specmortem.upstream import vllm_files as files

_STEP = {  # files and functions of a step of the V1 runner
    files.RUNNER: "GPUModelRunner._prepare_inputs",
    files.BATCH: "InputBatch",
    files.ATTENTION_UTILS: "reorder_batch_to_split_decodes_and_prefills",
    files.UTILS: "update_num_computed_tokens_for_batch_change",
    files.MAMBA: "postprocess_mamba_align_gpu",
}


def _probe(cause: str, title: str, also: tuple[tuple[str, str], ...] = (), version: int = 1) -> Probe:
    return Probe(cause, title, tuple((path,) for path in _STEP), tuple(_STEP.values()), also, version=version)


def _completions(mode: str) -> Campaign:
    kwargs = {"mode": mode, "transitions": 20}
    return Campaign(f"{__name__}.arms:copy_completions", "interleavings", kwargs=kwargs, takes_device=False)


INCIDENT = Incident(
    slug="async-accepted-counts",
    package=__name__,
    shown="by released functions under a forced order of the copy; on whole engines not seen",
    probes=(
        _probe(
            "stale-count-none",
            "the first draft of a request inherits another request's accepted count",
            also=((files.CACHE, files.CACHE_MODES),),
            version=2,
        ),
        _probe("stale-count-align", "align: rows inherit the accepted counts of others"),
        Probe(
            "graph-metadata-rows",
            "metadata of a captured graph has a row per token, not per request",
            ((files.GDN,), (files.ATTENTION_UTILS,)),
            ("GDNAttentionMetadataBuilder.build", "mamba_get_block_table_tensor"),
        ),
    ),
    exposure={
        "stale-count-none": Rule(
            (V1, HYBRID, SPECULATION, ASYNC, NOT_ALIGN, CONCURRENT),
            "a request that ends as another begins to draft",
        ),
        "stale-count-align": Rule((V1, HYBRID, SPECULATION, ALIGN, COUNTS, CONCURRENT)),
        "graph-metadata-rows": Rule(
            (HYBRID, SPECULATION, FULL_GRAPHS),
            "something that reads the added rows; nothing known does",
            "link",
        ),
    },
    campaigns={"stale-count-none": _completions("none"), "stale-count-align": _completions("align")},
)
