"""Recurrent state copied through another request's block ids, in a pipeline with MTP drafts and mode align."""

from specmortem.exposure import (
    ALIGN,
    CACHING,
    CONCURRENT,
    NEVER_SEEN,
    PIPELINE,
    SMALL_BLOCKS,
    SPECULATION,
    V2,
    Rule,
)
from specmortem.incident import Campaign, Incident, Needs, Probe
from specmortem.upstream import vllm_files as files


def _probe(cause: str, title: str, needs: Needs = "any") -> Probe:
    functions = (files.POSTCOPY, "MambaHybridModelState.postprocess_state")
    return Probe(cause, title, ((files.MAMBA,), (files.HYBRID,)), functions, needs=needs)


INCIDENT = Incident(
    slug="pp-align-copy",
    package=__name__,
    shown="by the released state class and kernels; on whole engines not run",
    probes=(
        _probe("batch-row-index", "state is copied through the block ids of another request"),
        _probe(
            "accepted-written-in-place",
            "accepted counts are reset while other programs read them",
            "interpreter",
        ),
        _probe("overlapping-shift", "a window is shifted inside its block without an order", "interpreter"),
        _probe("seed-column-divisor", "the first running column is counted in blocks of another size"),
        _probe("null-block-copied", "the null block is taken for a state"),
    ),
    exposure={
        "batch-row-index": Rule(
            (V2, PIPELINE, SPECULATION, ALIGN, CONCURRENT), "rows that change between steps"
        ),
        "accepted-written-in-place": Rule((V2, SPECULATION, ALIGN)),
        "overlapping-shift": Rule((SPECULATION, ALIGN), "an accepted run that ends a block where it started"),
        "seed-column-divisor": Rule((V2, ALIGN, CACHING, SMALL_BLOCKS), "a hit in the prefix cache"),
        "null-block-copied": Rule((V2, ALIGN, NEVER_SEEN), effect="unseen"),
    },
    campaigns={
        "batch-row-index": Campaign(
            f"{__name__}.arms:random_workloads", "workloads", "subject", {"workloads": 1}
        )
    },
)
