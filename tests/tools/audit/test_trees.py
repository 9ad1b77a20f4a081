"""Released trees, whole and with one line changed: verdicts flip, stay, or are not given; never a wrong `clean`."""

import shutil

import pytest

from specmortem import incident, upstream
from specmortem.errors import BadInputError, UnavailableError
from specmortem.tools.audit.matrix import audit, chosen
from specmortem.upstream import vllm_files
from specmortem.upstream.cache import default_cache

pytestmark = [pytest.mark.network, pytest.mark.usefixtures("interpreted")]
V1, V2, UTILS, SPECULATOR = vllm_files.V1, vllm_files.V2, vllm_files.UTILS, vllm_files.V2_SPECULATOR
REAL_CACHE = default_cache()


@pytest.fixture
def releases(tmp_path, monkeypatch):
    """A cache that has the files of releases and no verdicts; fetches what is missing there."""

    def use(*versions):
        for version in versions:
            try:
                tree = upstream.resolve(f"vllm=={version}")
                for path, name in ((UTILS, V1), (SPECULATOR, V2)):
                    if tree.has(path):
                        upstream.closure_hash(tree, path, name)
            except UnavailableError as error:
                pytest.skip(str(error))
            shutil.copytree(tree.root, tmp_path / "cache" / tree.root.name)
        monkeypatch.setenv("SPECMORTEM_CACHE", str(tmp_path / "cache"))

    return use


def statuses(done):
    return {(row.cause, row.subject): row.status for row in done.rows}


def test_identical_code_is_judged_once_and_says_whose_lines_it_shows(releases):
    releases("0.22.0", "0.22.1")
    cause = "v1-rejected-equals-context"
    done = audit(["vllm==0.22.0", "vllm==0.22.1"], [cause])
    older, newer = done.rows
    assert (older.status, newer.status, done.judged) == ("fault", "fault", 1)
    assert (older.same_code_as, newer.same_code_as) == ("vllm==0.22.1", "")
    assert older.hashes == newer.hashes and list(older.hashes) == [V1]
    assert older.witness == " ".join(older.witness.split()) and "utils.py:526" in newer.witness
    again = audit(["vllm==0.22.0", "vllm==0.22.1"], [cause])
    assert (again.judged, again.cached, again.bytes_moved) == (0, 2, 0)
    assert again.rows == done.rows


def test_no_cache_judges_anew(releases):
    releases("0.22.1")
    cause = "v1-rejected-equals-context"
    audit(["vllm==0.22.1"], [cause])
    assert audit(["vllm==0.22.1"], [cause], keep=False).judged == 1


def test_a_function_that_a_tree_does_not_have_is_not_present(releases):
    releases("0.22.1")
    (row,) = audit(["vllm==0.22.1"], ["v2-null-block"]).rows
    assert row.status == "not-present" and not row.unavailable
    assert SPECULATOR in row.witness


def test_what_needs_a_gpu_is_not_judged_and_says_so(releases):
    releases("0.22.1")
    (row,) = audit(["vllm==0.22.1"], ["recovered-token-out-of-vocab"]).rows
    assert row.status == "not-judged" and "--device cuda" in row.witness


@pytest.fixture
def patched(tmp_path):
    """The V2 speculator of 0.28.0 or the V1 kernel of 0.22.1 in a folder, with texts replaced."""

    def make(version, path, changes=(), target="", folder="patched"):
        try:
            tree = upstream.resolve(f"vllm=={version}", REAL_CACHE)
            upstream.closure_hash(tree, path, V1 if path == UTILS else V2)
        except UnavailableError as error:
            pytest.skip(str(error))
        shutil.copytree(tree.root / "vllm", tmp_path / folder / "vllm", dirs_exist_ok=True)
        text = (tmp_path / folder / path).read_text(encoding="utf-8")
        for old, new in dict(changes).items():
            assert text.count(old) >= 1, old
            text = text.replace(old, new)
        if target:
            (tmp_path / folder / path).unlink()
            (tmp_path / folder / target).write_text(text, encoding="utf-8")
        else:
            (tmp_path / folder / path).write_text(text, encoding="utf-8")
        return f"tree:{tmp_path / folder}"

    return make


GUARD = {"is_query & (q_block_id != 0)": "is_query"}
LOAD = "last_pos = tl.load(target_positions_ptr + valid_ctx_end - 1)"
MASKED = (
    "last_pos = tl.load(target_positions_ptr + valid_ctx_end - 1, mask=valid_ctx_end > ctx_start, other=0)"
)


@pytest.mark.parametrize(
    ("version", "path", "cause", "changes", "target", "expected"),
    [
        ("0.28.0", SPECULATOR, "v2-null-block", {}, "", "clean"),
        ("0.28.0", SPECULATOR, "v2-null-block", GUARD, "", "fault"),
        ("0.22.1", UTILS, "v1-rejected-equals-context", {}, "", "fault"),
        ("0.22.1", UTILS, "v1-rejected-equals-context", {f"def {V1}(": "def renamed("}, "", "not-present"),
        ("0.28.0", SPECULATOR, "v2-null-block", {f"def {V2}(": "def renamed("}, "", "not-present"),
        ("0.28.0", SPECULATOR, "v2-null-block", {}, "vllm/v1/worker/gpu/moved.py", "not-present"),
        (
            "0.28.0",
            SPECULATOR,
            "v2-null-block",
            {f"def {V2}(": f"def {V2}(a_new_argument, "},
            "",
            "not-judged",
        ),
        (
            "0.22.1",
            UTILS,
            "v1-rejected-equals-context",
            {f"def {V1}(": f"def {V1}(a_new_argument, "},
            "",
            "not-judged",
        ),
    ],
)
def test_one_changed_line_never_gives_a_wrong_clean(
    version, path, cause, changes, target, expected, patched, cache, releases
):
    whole = audit([patched(version, path, folder="whole")], [cause])
    done = audit([patched(version, path, changes, target)], [cause])
    assert done.rows[0].status == expected, done.rows[0].witness
    assert not done.rows[0].same_code_as
    assert whole.rows[0].status in ("fault", "clean")


def test_a_fix_applied_flips_the_verdict_though_the_release_is_known(patched, releases):
    releases("0.22.1")
    cause = "v1-rejected-equals-context"
    assert audit(["vllm==0.22.1"], [cause]).rows[0].status == "fault"
    fixed = patched("0.22.1", UTILS, {LOAD: MASKED})
    row = audit([fixed], [cause]).rows[0]
    assert not row.same_code_as
    same = audit([patched("0.22.1", UTILS, {}, folder="same")], [cause])
    assert (same.judged, same.rows[0].status, same.rows[0].same_code_as) == (0, "fault", "vllm==0.22.1")


RUNNER, GDN = "vllm/v1/worker/gpu_model_runner.py", vllm_files.GDN
ALIGN = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
FLASHINFER = "vllm/v1/attention/backends/flashinfer.py"
SYNC = ":\n            self.num_accepted_tokens_event.synchronize()"
WAITS = f"if self.num_accepted_tokens_event is not None{SYNC}"
ASYNC = 'self.use_async_scheduling and self.cache_config.mamba_cache_mode != "align"'
NO_WAIT = {WAITS: WAITS.replace(":", f" and not ({ASYNC}):", 1)}
TOKENS, REQUESTS = "batch_size = m.num_actual_tokens", "batch_size = m.num_reqs"
SEED = "(new_req_data.num_computed_tokens - 1) // self.cache_config."
MAMBA_BLOCK = "mamba_block_size = self.cache_config.mamba_block_size"
BATCH_ORDER = {"block_tables.block_tables[gid].gpu": "block_tables.input_block_tables[gid]"}
PINNED = {
    "pin_memory=False": "pin_memory=True",
    "= paged_kv_indptr_cpu.pin_memory()": "= paged_kv_indptr_cpu",
    "= paged_kv_last_page_len_cpu.pin_memory()": "= paged_kv_last_page_len_cpu",
}


@pytest.mark.parametrize(
    ("version", "cause", "path", "changes", "expected"),
    [
        ("0.23.0", "graph-metadata-rows", GDN, {TOKENS: REQUESTS}, "clean"),
        ("0.24.0", "graph-metadata-rows", GDN, {REQUESTS: TOKENS}, "fault"),
        ("0.23.0", "stale-count-none", RUNNER, NO_WAIT, "clean"),
        ("0.24.0", "stale-count-none", RUNNER, {ASYNC: "False"}, "fault"),
        ("0.31.0", "seed-column-divisor", ALIGN, {SEED: f"{SEED}mamba_"}, "clean"),
        ("0.32.0", "seed-column-divisor", ALIGN, {MAMBA_BLOCK: MAMBA_BLOCK.replace(".mamba_", ".")}, "fault"),
        ("0.32.0", "batch-row-index", ALIGN, BATCH_ORDER, "fault"),
        ("0.29.0", "builder-staging-reuse", FLASHINFER, PINNED, "fault"),
    ],
)
def test_a_fix_applied_or_reverted_flips_the_verdict(version, cause, path, changes, expected, tmp_path):
    whole = audit([f"vllm=={version}"], [cause]).rows[0]
    if whole.unavailable:
        pytest.skip(whole.witness)
    assert whole.status == {"clean": "fault", "fault": "clean"}[expected]
    shutil.copytree(REAL_CACHE / f"vllm-{version}" / "vllm", tmp_path / "vllm")
    text = (tmp_path / path).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / path).write_text(text, encoding="utf-8")
    row = audit([f"tree:{tmp_path}"], [cause]).rows[0]
    assert (row.status, row.same_code_as) == (expected, "")


def test_a_second_run_over_a_changed_tree_sees_the_change(patched, cache):
    subject = patched("0.28.0", SPECULATOR)
    assert audit([subject], ["v2-null-block"]).rows[0].status == "clean"
    again = audit([subject], ["v2-null-block"])
    assert (again.judged, again.rows[0].status) == (0, "clean")
    patched("0.28.0", SPECULATOR, GUARD)
    changed = audit([subject], ["v2-null-block"])
    assert (changed.judged, changed.rows[0].status) == (1, "fault")


def test_a_tree_is_never_written_to(patched, cache, tmp_path):
    subject = patched("0.28.0", SPECULATOR)
    folder = tmp_path / "patched"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    audit([subject], ["v2-null-block", "v2-stale-tail"])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_subject_that_cannot_be_had_leaves_the_others_intact(patched, cache):
    subject = patched("0.28.0", SPECULATOR)
    done = audit(["tree:/nowhere", subject], ["v2-null-block"])
    gone, there = done.rows
    assert (gone.status, gone.unavailable, there.status) == ("not-judged", True, "clean")


def test_causes_are_chosen_by_name_and_incident():
    assert chosen(["v2-null-block"]) == ["v2-null-block"]
    assert "batch-row-index" in chosen((), ["pp-align-copy"]) and "v2-null-block" not in chosen(
        (), ["pp-align-copy"]
    )
    assert len(chosen()) == len(incident.causes())
    with pytest.raises(BadInputError, match="known causes"):
        chosen(["nonsense"])
    with pytest.raises(BadInputError, match="no incident"):
        chosen((), ["nonsense"])
