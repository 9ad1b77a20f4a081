"""DFlash, CUDA graphs and concurrency: an illegal address without a kernel's name."""

from specmortem.exposure import (
    ASYNC,
    CONCURRENT,
    DFLASH,
    FULL_GRAPHS,
    GRAPHS,
    HYBRID,
    NEVER_SEEN,
    OLD_LOOKAHEAD,
    SPECULATION,
    V1,
    V2,
    Rule,
)
from specmortem.incident import Campaign, Incident, Probe
from specmortem.upstream import vllm_files as files


def _v1(cause: str, title: str) -> Probe:
    return Probe(cause, title, ((files.UTILS,),), (files.V1,))


def _v2(cause: str, title: str) -> Probe:
    return Probe(cause, title, ((files.V2_SPECULATOR,),), (files.V2,))


INCIDENT = Incident(
    slug="dflash-oob",
    package=__name__,
    shown="by released kernels; the chain of causes on this package's own arms, no fault in runs of whole engines",
    probes=(
        _v1("v1-rejected-equals-context", "V1: the last valid position of a request without one"),
        Probe(
            "stale-block-id",
            "a block id after the allocated prefix is used",
            ((files.UTILS,),),
            (files.V1,),
            also=((files.V2_SPECULATOR, files.V2),),
        ),
        _v2("v2-null-block", "V2: the null block is taken for a slot"),
        _v2("v2-rejected-context-slots", "V2: rejected context rows keep their slots"),
        _v2("v2-past-max-len", "V2: positions and lengths past max_model_len"),
        _v2("v2-slot-past-max-len", "V2: positions past max_model_len write into the last block"),
        _v2("v2-stale-tail", "V2: padded rows of a replayed graph reach live state"),
        Probe(
            "gdn-unbounded-accepted",
            "an accepted count outside 1 … K + 1 indexes another row",
            (files.GATING, (files.CONV,)),
            ("fused_sigmoid_gating_delta_rule_update", "causal_conv1d_update"),
            needs="interpreter",
        ),
        Probe(
            "recovered-token-out-of-vocab",
            "a NaN row recovers a token id outside the vocabulary",
            ((files.REJECTION,),),
            ("sample_recovered_tokens_kernel",),
            needs="cuda",
            why="the interpreter's maximum treats NaN as numpy does",
        ),
    ),
    exposure={
        "v1-rejected-equals-context": Rule(
            (V1, DFLASH),
            "a request whose whole context is rejected, which takes an accepted count of 0",
            "link",
        ),
        "stale-block-id": Rule((DFLASH, OLD_LOOKAHEAD)),
        "stale-graph-tail": Rule((V1, DFLASH, NEVER_SEEN), effect="unseen"),
        "capture-below-buffer": Rule((V1, DFLASH, NEVER_SEEN), effect="unseen"),
        "v2-null-block": Rule((V2, DFLASH), "evicted or unallocated columns", "drafts"),
        "v2-rejected-context-slots": Rule((V2, DFLASH), "any rejection", "drafts"),
        "v2-past-max-len": Rule((V2, DFLASH), "a request near max_model_len", "crash"),
        "v2-slot-past-max-len": Rule((V2, DFLASH), "a request near max_model_len", "drafts"),
        "v2-stale-tail": Rule((V2, DFLASH, FULL_GRAPHS), "a padded batch size", "drafts"),
        "gdn-unbounded-accepted": Rule(
            (V1, HYBRID, SPECULATION), "an accepted count of 0 or above K + 1", "link"
        ),
        "recovered-token-out-of-vocab": Rule((V1, SPECULATION), "NaN logits and random sampling", "link"),
        "count-to-lookup-chain": Rule(
            (V1, HYBRID, SPECULATION, ASYNC, GRAPHS, CONCURRENT),
            "requests that come and go",
            "crash",
            (
                ("stale-count-none", "stale-count-align"),
                ("recovered-token-out-of-vocab",),
                ("gdn-unbounded-accepted",),
            ),
        ),
    },
    campaigns={
        "v1-rejected-equals-context": Campaign(
            f"{__name__}.arms:random_states", "states", kwargs={"launches": 2, "requests": 16}
        )
    },
)
