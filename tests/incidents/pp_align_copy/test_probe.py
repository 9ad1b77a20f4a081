"""The probes fire on `before` and not on `after`; released trees, whole and with the fix put in or taken out."""

import shutil

import pytest

from specmortem import upstream
from specmortem.errors import UnavailableError
from specmortem.incidents.pp_align_copy import INCIDENT
from specmortem.incidents.pp_align_copy import probe as pp_align_copy
from specmortem.incidents.pp_align_copy.probe import HYBRID, MAMBA

pytestmark = pytest.mark.usefixtures("interpreted")
PROBES = [probe.cause for probe in INCIDENT.probes]
RELEASES = {
    "0.24.0": "-----",
    "0.25.1": "FFFFF",
    "0.27.1": "FFFFF",
    "0.28.0": "FcFFF",
    "0.29.0": "FccFF",
    "0.31.0": "FccFF",
    "0.32.0": "ccccF",
    "0.33.0": "ccccF",
}
LETTERS = {"fault": "F", "clean": "c", "not-judged": "-"}


def outcome(cause, subject):
    return pp_align_copy.judge(cause, subject)["outcome"]


@pytest.mark.parametrize("cause", PROBES)
def test_probe_fires_on_before_and_is_silent_on_after(cause):
    assert [outcome(cause, arm) for arm in ("before", "after")] == ["fault", "clean"]


def test_evidence_names_the_victim_and_the_kernel():
    evidence = pp_align_copy.judge("batch-row-index", "before")["evidence"]
    assert "block 1 of slot 3 wrong" in evidence["observed"]
    assert "block 6 of slot 2 wrong" in evidence["observed"]
    assert evidence["place"].startswith("postcopy_kernel (kernels.py:")
    assert evidence["detail"]["consumed_at_once"] == "every block and every count as in the reference"


def test_evidence_names_the_column_past_the_row():
    evidence = pp_align_copy.judge("seed-column-divisor", "before")["evidence"]
    assert "block_table[8399] is outside block_table[0, 123) of slot 0" in evidence["observed"]


def test_a_race_is_a_byte_that_two_warps_reach_and_a_barrier_orders_them():
    import numpy as np
    import torch

    memory = torch.zeros(64, dtype=torch.int64)
    at = memory.data_ptr() + 8 * np.arange(64, dtype=np.uint64)
    every = np.ones(64, dtype=bool)

    def races(shift, between):
        log = pp_align_copy.LaneLog()
        log.phase()
        log.add("load", at, every, 8, "here")
        between(log)
        log.add("store", at - np.uint64(8 * shift), every, 8, "there")
        return log.races(memory)

    assert [race.byte for race in races(40, lambda _: None)][0] == 0
    assert {(r.loaded_by, r.stored_by) for r in races(40, lambda _: None)} == {(0, 1)}
    assert races(40, lambda log: log.phase()) == races(0, lambda _: None) == []


def tree(version):
    try:
        found = upstream.resolve(f"vllm=={version}")
        found.fetch([path for path in (MAMBA, HYBRID) if found.has(path)])
    except UnavailableError as error:
        pytest.skip(str(error))
    return found


@pytest.mark.network
@pytest.mark.parametrize("version", RELEASES)
def test_verdicts_on_releases(version):
    tree(version)
    assert "".join(LETTERS[outcome(cause, f"vllm=={version}")] for cause in PROBES) == RELEASES[version]


@pytest.mark.network
def test_a_release_without_align_copies_is_not_judged_and_says_why():
    tree("0.24.0")
    evidence = pp_align_copy.judge("batch-row-index", "vllm==0.24.0")["evidence"]
    assert "does not define precopy_mamba_align_fused_kernel" in evidence["reason"]


POST_ROW = ("bt_row_idx = batch_idx if HAS_IDX_MAPPING else req_idx", "bt_row_idx = req_idx")
PRE_ROW = ("        batch_idx,\n        src_col,", "        req_idx,\n        src_col,")
BIND = (
    "    def preprocess_state(",
    "    def initialize_kv_cache(self, kv_cache_config, block_tables):\n"
    "        ids, _ = self._get_mamba_group_info(kv_cache_config)\n"
    "        tables = {gid: block_tables.block_tables[gid].gpu for gid in ids}\n"
    "        self._ensure_align_ctx(kv_cache_config, ids, tables)\n\n"
    "    def preprocess_state(",
)
UNBIND = ("block_tables.block_tables[gid].gpu", "block_tables.input_block_tables[gid]")
BATCH_POST = (
    "        state_idx,\n        req_idx,\n        src_block_idx,",
    "        state_idx,\n        batch_idx,\n        src_block_idx,",
)
BATCH_PRE = (
    "        state_idx,\n        req_idx,\n        src_col,",
    "        state_idx,\n        batch_idx,\n        src_col,",
)


def patched(version, folder, mamba=(), hybrid=()):
    """A tree of the release's two files with texts replaced; each old text occurs exactly once."""
    source = tree(version)
    for path, changes in ((MAMBA, mamba), (HYBRID, hybrid)):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.fetch([path])[path], target)
        text = target.read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        target.write_text(text, encoding="utf-8")
    return f"tree:{folder}"


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "mamba", "hybrid", "expected"),
    [
        ("0.31.0", (), (), "fault"),
        ("0.31.0", (POST_ROW, PRE_ROW), (BIND,), "clean"),
        ("0.31.0", (POST_ROW, PRE_ROW), (), "fault"),
        ("0.31.0", (), (BIND,), "fault"),
        ("0.33.0", (), (), "clean"),
        ("0.33.0", (BATCH_POST, BATCH_PRE), (UNBIND,), "fault"),
        ("0.33.0", (BATCH_POST,), (), "fault"),
        ("0.33.0", (BATCH_PRE,), (), "fault"),
        ("0.33.0", (), (UNBIND,), "fault"),
    ],
)
def test_the_fix_flips_the_verdict_and_either_half_alone_does_not(version, mamba, hybrid, expected, tmp_path):
    assert outcome("batch-row-index", patched(version, tmp_path, mamba, hybrid)) == expected


@pytest.mark.network
def test_the_divisor_of_the_fix_flips_the_seed(tmp_path):
    change = ("// self.cache_config.block_size", "// self.cache_config.mamba_block_size")
    assert outcome("seed-column-divisor", patched("0.31.0", tmp_path, hybrid=(change,))) == "clean"
