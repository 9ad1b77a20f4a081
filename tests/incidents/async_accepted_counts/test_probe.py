"""The probes fire on `before` and not on `after`; released trees, whole and with a fix put in or taken out."""

import re
import shutil
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specmortem import judge as probes
from specmortem import upstream
from specmortem.device import Lazy, SimDevice
from specmortem.errors import UnavailableError
from specmortem.incidents.async_accepted_counts import probe as async_accepted_counts
from specmortem.incidents.async_accepted_counts.engine.copy_completion import (
    CopyCompletion,
    HostArray,
    PinnedTensor,
)
from specmortem.incidents.async_accepted_counts.engine.input_batch import InputBatch, NewRequest
from specmortem.incidents.async_accepted_counts.engine.transition import (
    EXAMPLE,
    StepRow,
    Transition,
    landings,
    own_step,
)
from specmortem.incidents.async_accepted_counts.probe import PROBES, transitions
from specmortem.incidents.async_accepted_counts.released import RunnerCode, counts_of
from specmortem.upstream.vllm_files import ATTENTION_UTILS, BATCH, CACHE, GDN, MAMBA, RUNNER, UTILS

OLD = [
    "0.19.1",
    "0.20.0",
    "0.20.1",
    "0.20.2",
    "0.21.0",
    "0.22.0",
    "0.22.1",
    "0.23.0",
]
NEW = [
    "0.24.0",
    "0.25.0",
    "0.25.1",
    "0.26.0",
    "0.27.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
]
RELEASES = dict.fromkeys(OLD, "FFF") | dict.fromkeys(NEW, "cFc")
LETTERS = {"fault": "F", "clean": "c", "not-judged": "-"}
LOGITS = "vllm/v1/sample/logits_processor"
FILES = (
    RUNNER,
    BATCH,
    MAMBA,
    GDN,
    ATTENTION_UTILS,
    UTILS,
    CACHE,
    "vllm/utils/__init__.py",
    "vllm/utils/collection_utils.py",
    "vllm/v1/utils.py",
    *(f"{LOGITS}/{name}.py" for name in ("__init__", "interface", "state")),
)


def outcome(cause, subject):
    return async_accepted_counts.judge(cause, subject)["outcome"]


def letters(subject):
    return "".join(LETTERS[outcome(cause, subject)] for cause in PROBES)


@pytest.mark.parametrize("cause", PROBES)
def test_probe_fires_on_before_and_is_silent_on_after(cause):
    assert [outcome(cause, arm) for arm in ("before", "after")] == ["fault", "clean"]


def test_evidence_names_the_request_its_right_count_and_the_landing():
    evidence = async_accepted_counts.judge("stale-count-none", "before")["evidence"]
    assert evidence["observed"] == "P has 4; wrong in 7 of 253 landings"
    assert evidence["expected"] == "P has 1"
    assert evidence["witness"].endswith(
        "the copy lands after add_request writes row 0 and before swap_states reads row 0"
    )
    assert evidence["place"].startswith("accepted_counts.py:")
    assert evidence["detail"]["victims"] == {"first-draft": 7}


@pytest.mark.parametrize(
    ("arm", "phases"),
    [
        ("hoist-wait", {"before"}),
        ("drop-gather", {"inside", "after"}),
        ("hoist-and-drop", set()),
        ("private-target", set()),
    ],
)
def test_of_the_four_shapes_for_align_two_are_right(arm, phases):
    found = landings(own_step(arm, "align"), transitions())
    assert {one.copy.phase for one in found if one.victims} == phases


def test_evidence_of_the_metadata_gives_the_rows_of_each_tensor():
    evidence = async_accepted_counts.judge("graph-metadata-rows", "before")["evidence"]
    assert evidence["witness"] == "72 requests, 288 tokens"
    assert evidence["observed"].startswith("288 of spec_state_indices_tensor, 288 of spec_sequence_masks")
    padded = evidence["detail"]["rows"]["4 requests, 1 of them padding, 16 tokens"]
    assert set(padded.values()) == {16}


def test_transitions_hold_the_window_and_every_small_batch_once():
    assert len(set(transitions())) == len(transitions())
    assert all(t.right for t in transitions())
    assert {len(t.rows) for t in transitions()} == {1, 2, 3, 4}


def test_the_right_count_of_a_first_draft_is_one_and_of_a_chunk_of_a_prompt_none():
    rows = (
        StepRow("A", "decode", 4, finished=True),
        StepRow("B", "decode", 2),
        StepRow("P", "first-draft"),
        StepRow("C", "prefill"),
    )
    assert Transition(rows, ("Q",)).right == {"B": 2, "P": 1}


def in_flight(values):
    """A pinned tensor of ones whose copy of `values` is queued and not run, with what was noted of it."""
    device, copy = SimDevice(Lazy()), CopyCompletion()
    device.observers.append(copy)
    buffer = device.host_buffer((4,), torch.int32, name="accepted counts")
    buffer[:] = 1
    pinned = PinnedTensor(buffer)
    pinned[: len(values)].copy_(torch.tensor(values), non_blocking=True)
    copy.second_step_begins()
    return device, copy, pinned.numpy()


def test_a_copy_in_flight_overwrites_what_the_host_wrote_meanwhile():
    device, copy, counts = in_flight([4, 2])
    counts[0] = 9
    assert counts[0] == 9
    event = device.event()
    event.record()
    event.synchronize()
    assert list(counts[:]) == [4, 2, 1, 1]
    copy.rows_have_moved()
    assert copy.phase == "inside"


def test_a_copy_takes_what_the_device_held_when_it_was_queued():
    device, _, counts = in_flight([])
    source = torch.tensor([3, 3, 3, 3], dtype=torch.int32)
    PinnedTensor(counts._buffer).copy_(source, non_blocking=True)
    source.fill_(1)
    device.synchronize()
    assert list(counts[:]) == [3, 3, 3, 3]


def test_a_blocking_copy_is_not_in_flight():
    device, copy = SimDevice(Lazy()), CopyCompletion()
    device.observers.append(copy)
    pinned = PinnedTensor(device.host_buffer((2,), torch.int32, name="accepted counts"))
    pinned.copy_(torch.tensor([4, 2]))
    copy.second_step_begins()
    assert list(pinned.numpy()[:]) == [4, 2]
    assert copy.phase == "not-in-flight"


def test_a_slice_of_the_host_array_refuses_a_write_that_would_be_lost():
    _, _, counts = in_flight([4])
    assert isinstance(counts, HostArray)
    with pytest.raises(ValueError, match="read-only"):
        counts[1:].fill(7)
    assert np.array_equal(counts[1:], [1, 1, 1])


def tree(version):
    try:
        found = upstream.resolve(f"vllm=={version}")
        found.fetch([path for path in FILES if found.has(path)])
    except UnavailableError as error:
        pytest.skip(str(error))
    return found


@pytest.mark.network
@pytest.mark.parametrize("version", RELEASES)
def test_verdicts_on_releases(version):
    tree(version)
    assert letters(f"vllm=={version}") == RELEASES[version]


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "wrong", "told"),
    [
        ("0.19.1", 7, "P has 4; wrong in 7 of 253 landings; mode all: the same"),
        ("0.22.0", 7, "P has 4; wrong in 7 of 253 landings; mode all: the same"),
        ("0.23.0", 7, "P has 4; wrong in 7 of 253 landings; mode all: the same"),
        ("0.24.0", 0, "every count is the request's own in 253 landings; mode all: the same"),
        ("0.31.0", 0, "every count is the request's own in 253 landings; mode all: the same"),
        ("0.32.0", None, "every count is the request's own in 253 landings; mode all: absent"),
        ("0.33.0", None, "every count is the request's own in 253 landings; mode all: absent"),
    ],
)
def test_a_release_is_judged_in_mode_all_too(version, wrong, told):
    tree(version)
    evidence = async_accepted_counts.judge("stale-count-none", f"vllm=={version}")["evidence"]
    in_all = evidence["detail"]["mode_all"]
    assert evidence["observed"] == told
    if wrong is None:
        assert in_all == {"absent": "MambaCacheMode of vllm/config/cache.py does not name it"}
    else:
        assert in_all["landings"] == evidence["detail"]["landings"]
        assert sum(bad for bad, _ in in_all["landings"].values()) == wrong


@pytest.mark.network
def test_released_methods_and_our_before_are_wrong_after_the_same_landings():
    tree("0.23.0")
    released, own = (
        async_accepted_counts.judge("stale-count-none", subject)["evidence"]
        for subject in ("vllm==0.23.0", "before")
    )
    rows = [
        async_accepted_counts.judge("graph-metadata-rows", s)["evidence"]["detail"]["rows"]
        for s in ("vllm==0.23.0", "before")
    ]
    assert rows[0] == rows[1]
    for part in ("landings", "victims", "transitions"):
        assert released["detail"][part] == own["detail"][part]
    assert released["witness"] == own["witness"]
    assert released["place"] == "gpu_model_runner.py:1536"


@pytest.mark.network
def test_align_is_wrong_after_as_many_landings_as_in_the_released_runner():
    tree("0.33.0")
    released, own = (
        async_accepted_counts.judge("stale-count-align", subject)["evidence"]["detail"]
        for subject in ("vllm==0.33.0", "before")
    )
    for part in ("landings", "victims"):
        assert released[part] == own[part]


@pytest.mark.network
def test_our_batch_is_reordered_by_the_same_swaps_as_the_released_one():
    lifted = upstream.lift(
        tree("0.23.0"), ATTENTION_UTILS, "reorder_batch_to_split_decodes_and_prefills", provide={}
    )
    for regions in (r for size in range(1, 6) for r in product(range(3), repeat=size)):
        swaps, batch = [], InputBatch(SimDevice(Lazy()), 5)
        computed = [(10, 5, 0)[region] for region in regions]
        released = SimpleNamespace(
            req_ids=list(range(len(regions))),
            num_computed_tokens_cpu=np.array(computed),
            num_prompt_tokens=np.full(len(regions), 8),
            swap_states=lambda one, other, swaps=swaps: swaps.append((one, other)),
        )
        scheduled = {row: 9 if region else 4 for row, region in enumerate(regions)}
        lifted.function(released, SimpleNamespace(num_scheduled_tokens=scheduled), 4)
        for row in range(len(regions)):
            batch.add_request(NewRequest(row))
        assert batch.reorder(regions.__getitem__) == swaps, regions


@pytest.mark.network
def test_up_to_0_21_align_is_wrong_without_a_copy_in_flight():
    tree("0.21.0")
    detail = async_accepted_counts.judge("stale-count-align", "vllm==0.21.0")["evidence"]["detail"]
    assert list(detail["landings"]) == ["not-in-flight"]
    assert list(detail["victims"]) == ["decode"]


@pytest.mark.network
def test_the_isolated_probe_gives_the_same_verdicts():
    tree("0.24.0")
    verdicts = probes.judge_many([(cause, "vllm==0.24.0") for cause in PROBES])
    assert "".join(LETTERS[v.outcome] for v in verdicts) == RELEASES["0.24.0"]


WAIT = "            self.num_accepted_tokens_event.synchronize()\n"
GATE = (
    "        if self.num_accepted_tokens_event is not None:\n" + WAIT,
    "        if self.num_accepted_tokens_event is not None and not (\n"
    '            self.use_async_scheduling and self.cache_config.mamba_cache_mode != "align"\n'
    "        ):\n" + WAIT,
)
UNGATE = ('self.use_async_scheduling and self.cache_config.mamba_cache_mode != "align"', "False")
BY_REQUEST = ("batch_size = m.num_actual_tokens", "batch_size = m.num_reqs")
BY_TOKEN = BY_REQUEST[::-1]
NOW = "        if self.num_accepted_tokens_event is not None:\n" + WAIT
REMOVAL = (
    "        for req_id in scheduler_output.finished_req_ids:\n            req_state = self.requests.pop("
)
HOIST = (REMOVAL, NOW + REMOVAL)
CALL = "            deferred_state_corrections_fn = self._update_states(scheduler_output)\n"
HOIST_BEFORE_CALL = (CALL, re.sub("^ {8}", " " * 12, NOW, flags=re.M) + CALL)
DROP = ("            if self.use_async_scheduling and prev_req_id_to_index:\n", "            if False:\n")
OWNED = (
    "        self.num_accepted_tokens_event: torch.Event | None = None\n",
    "        self.num_accepted_tokens_event: torch.Event | None = None\n"
    "        self.landed_counts = torch.ones(\n"
    "            self.max_num_reqs, dtype=torch.int32, pin_memory=PIN_MEMORY\n"
    "        )\n",
)
LAND = (
    "                    self.input_batch.num_accepted_tokens_cpu_tensor\n                ),",
    "                    self.landed_counts\n                ),",
)
GATHER_OWNED = (
    "self.input_batch.num_accepted_tokens_cpu[\n                        np.where(",
    "self.landed_counts.numpy()[\n                        np.where(",
)
RENAMED = ("def _update_states_after_model_execute(", "def _after_execute(")
UNKNOWN = ("        num_reqs = self.input_batch.num_reqs\n        assert num_reqs > 0\n",) * 2


def patched(version, folder, **changes):
    """A tree of the release's files with texts replaced; each old text occurs exactly once."""
    source = tree(version)
    for path, copied in source.fetch([path for path in FILES if source.has(path)]).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(copied, target)
        text = target.read_text(encoding="utf-8")
        for old, new in changes.get({RUNNER: "runner", GDN: "gdn"}.get(path, ""), ()):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        target.write_text(text, encoding="utf-8")
    return f"tree:{folder}"


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "runner", "gdn", "expected"),
    [
        ("0.23.0", (), (), "FFF"),
        ("0.23.0", (GATE,), (BY_REQUEST,), "cFc"),
        ("0.23.0", (GATE,), (), "cFF"),
        ("0.23.0", (), (BY_REQUEST,), "FFc"),
        ("0.24.0", (), (), "cFc"),
        ("0.24.0", (UNGATE,), (BY_TOKEN,), "FFF"),
        ("0.24.0", (UNGATE,), (), "FFc"),
        ("0.24.0", (), (BY_TOKEN,), "cFF"),
    ],
)
def test_each_half_of_the_fix_flips_its_own_verdict(version, runner, gdn, expected, tmp_path):
    assert letters(patched(version, tmp_path, runner=runner, gdn=gdn)) == expected


@pytest.mark.network
def test_a_fix_of_mode_none_alone_leaves_mode_all_wrong_and_is_a_fault(tmp_path):
    old, new = GATE
    only_none = (old, new.replace('!= "align"', '== "none"'))
    subject = patched("0.23.0", tmp_path, runner=(only_none,))
    verdict = async_accepted_counts.judge("stale-count-none", subject)
    evidence = verdict["evidence"]
    told = "every count is the request's own in 253 landings; mode all: P has 4; wrong in 7 of 253 landings"
    assert (verdict["outcome"], evidence["observed"], evidence["expected"]) == ("fault", told, "P has 1")
    assert evidence["detail"]["mode_all"]["victims"] == {"first-draft": 7}
    assert evidence["detail"]["victims"] == {} and evidence["detail"]["hashes"]


@pytest.mark.network
def test_the_released_calls_of_mode_all_are_made_in_it_and_not_in_mode_none(monkeypatch):
    made = []
    calls = ("postprocess_mamba_all", "preprocess_mamba_all_specdec")
    code = RunnerCode(tree("0.23.0"))
    for name in calls:
        monkeypatch.setattr(code.given["mamba_utils"], name, lambda *_, name=name: made.append(name))
    for mode, expected in (("none", []), ("all", list(calls))):
        counts_of(code, mode, EXAMPLE, SimDevice(Lazy()))
        assert made == expected


@pytest.mark.network
def test_a_tree_without_a_list_of_modes_is_judged_in_mode_none_and_says_so(tmp_path):
    subject = patched("0.24.0", tmp_path)
    (tmp_path / CACHE).unlink()
    verdict = async_accepted_counts.judge("stale-count-none", subject)
    assert verdict["outcome"] == "clean"
    assert CACHE in verdict["evidence"]["detail"]["mode_all"]["absent"]


@pytest.mark.network
@pytest.mark.parametrize(
    ("changes", "phases"),
    [
        ((HOIST,), {"before"}),
        ((DROP,), {"inside", "after"}),
        ((HOIST, DROP), set()),
        ((HOIST_BEFORE_CALL, DROP), set()),
        ((OWNED, LAND, GATHER_OWNED), set()),
    ],
)
def test_shapes_of_a_fix_for_align_in_a_released_runner(changes, phases, tmp_path):
    """The same two of four are right as in this package's arms, also where `execute_model` waits."""
    evidence = async_accepted_counts.judge("stale-count-align", patched("0.33.0", tmp_path, runner=changes))[
        "evidence"
    ]
    landings = evidence["detail"]["landings"]
    assert {phase for phase, (wrong, _) in landings.items() if wrong} == phases
    assert "not-in-flight" not in landings


@pytest.mark.network
def test_a_tree_without_a_method_or_with_an_unknown_name_is_not_judged_and_says_why(tmp_path):
    subject = patched("0.23.0", tmp_path / "renamed", runner=(RENAMED,))
    verdict = async_accepted_counts.judge("stale-count-none", subject)
    assert verdict["outcome"] == "not-judged"
    assert "does not have GPUModelRunner._update_states_after_model_execute" in verdict["evidence"]["reason"]
    old, new = UNKNOWN
    subject = patched("0.23.0", tmp_path / "unknown", runner=((old, new + "        self.moon_phase += 1\n"),))
    verdict = async_accepted_counts.judge("stale-count-none", subject)
    assert verdict["outcome"] == "not-judged"
    assert "moon_phase" in verdict["evidence"]["reason"]
