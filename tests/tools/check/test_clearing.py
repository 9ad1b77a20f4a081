"""False all-clears: what is not known never turns unknown into not affected, in generated launches too."""

import importlib.util
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specmortem.affected.answers import answer
from specmortem.affected.matrix import configurations
from specmortem.affected.released import released
from specmortem.tools.check.inputs import inputs
from specmortem.tools.check.understand import understand

FILE = Path(__file__).parents[3] / "benchmarks" / "fuzz_check.py"
spec = importlib.util.spec_from_file_location("fuzz_check", FILE)
assert spec is not None and spec.loader is not None
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
HYBRID, DENSE = "vllm serve Qwen/Qwen3.5-27B", "vllm serve meta-llama/Llama-3.3-70B-Instruct"
MTP = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""
SHIFTED = f"{HYBRID} -pp 2 {MTP}"  # affected on 0.31.0: batch-row-index
launches = st.sampled_from([each.launch for each in configurations()])
releases = st.sampled_from(released().releases)


def exposure(text, release=""):
    """For each incident the worst answer that a launch of the text has."""
    order = ("affected", "unknown", "not-affected")
    found = [answer(case.config) for case in understand(inputs("x", text), release)]
    return {
        one.incident: min((each.incidents[at].answer for each in found), key=order.index)
        for at, one in enumerate(found[0].incidents)
    }


def cleared(before, after):
    """Incidents that were affected or unknown and are not affected after."""
    return [slug for slug, one in before.items() if one != "not-affected" and after[slug] == "not-affected"]


@pytest.mark.parametrize("seed", range(12))
def test_noise_of_every_kind_clears_nothing(seed):
    """The mutations of the large run, a few of each."""
    rng = random.Random(seed)
    for _ in range(12):
        kind, text, gone = fuzz.trial(rng)
        assert not gone, f"{kind}: {text}"


def test_an_answer_that_forgets_is_found_out():
    """The oracle fires: a launch without its drafter has lost causes."""
    before = fuzz.exposed(SHIFTED, "0.31.0")
    assert "batch-row-index" in fuzz.lost(before, fuzz.exposed(HYBRID, "0.31.0"))
    assert fuzz.lost(before, fuzz.exposed(SHIFTED, "0.31.0")) == []
    assert fuzz.lost(before, None) == ["everything"]


unknown_flags = st.from_regex(r"--[a-z]{3,12}(-[a-z]{2,9}){1,3}", fullmatch=True)


@QUICK
@given(launches, releases, unknown_flags, st.sampled_from(["", " 3", "=x", " '{\"a\": 1}'"]))
def test_a_flag_that_is_not_known_clears_nothing(launch, release, flag, value):
    """Went wrong: a flag that is not read may be what turns speculation on; the rest counted as the whole command."""
    assert cleared(exposure(launch, release), exposure(f"{launch} {flag}{value}", release)) == []


def spelt(spelling):
    return f"{DENSE} {spelling}"


DRAFTING = [
    "--Speculative-Config '{\"method\": \"dflash\"}'",
    "--speculative_config='{\"method\": \"dflash\"}'",
    "-sc '{\"method\": \"dflash\"}'",
    "-sc.method dflash",
    "-sc.method=dflash",
    "--speculative-config.method dflash",
    "--spec-method dflash",
    "--spec-method=dflash",
    "--spec-model org/x-dflash",
    "--spec-tokens 4",
    "--speculative-model org/x-dflash",
    "--speculative-config '{\"model\": \"org/x-dflash\"}'",
    "--speculative-config '{}'",
    "--speculative-config $SPEC",
    "--speculative-config \"$(cat spec.json)\"",
    "--speculative-config {method:dflash}",
    "--speculative-config \"{\\\"method\\\": \\\"dflash\\\"}\"",
    "--speculative-config '{\"method\": \"dflash\", ...'",
    "--speculative '{\"method\": \"dflash\"}'",
    "--spec '{\"method\": \"dflash\"}'",
    "--config serve.yaml",
    "--config=serve.yaml",
    "--hf-overrides '{\"speculators_config\": {\"algorithm\": \"dflash\"}}'",
    "$EXTRA_ARGS",
    "${EXTRA_ARGS}",
    "\"$@\"",
    "...",
]  # fmt: skip


@pytest.mark.parametrize("spelling", DRAFTING)
def test_no_spelling_of_a_drafter_is_no_drafter(spelling):
    """Went wrong: `--spec-model` and unread JSON were neutral, and a maker's model without a drafter is clear."""
    assert exposure(DENSE, "0.22.1")["dflash-oob"] == "not-affected"
    assert exposure(spelt(spelling), "0.22.1")["dflash-oob"] in ("affected", "unknown")


@pytest.mark.parametrize(
    "model", ["RedHatAI/Qwen3-8B-speculator.eagle3", "me/my-model", "/models/x", "Qwen/x-eagle3"]
)
def test_a_model_that_may_bring_its_own_drafter_is_not_cleared(model):
    """Went wrong: without --speculative-config there was "no speculation", though config.json names a drafter."""
    assert exposure(f"vllm serve {model}", "0.22.1")["dflash-oob"] == "unknown"


@QUICK
@given(launches, st.sampled_from(["{}", "{}.", "{},", "`{}`", '"{}"', "v{}", "{};"]))
def test_marks_around_a_release_change_nothing(launch, form):
    """Went wrong: `0.17.0.` with a full stop was no release, or one that no rule knew."""
    text = f"vLLM version {form.format('0.23.0')}\n{launch}"
    assert exposure(text) == exposure(launch, "0.23.0")


def test_an_old_release_with_a_full_stop_is_unknown():
    assert exposure(f"We run vLLM 0.17.0.\n{HYBRID} {MTP}")["async-accepted-counts"] == "unknown"


WORKAROUNDS = [
    "with --no-async-scheduling --max-num-seqs 1 --enforce-eager it is stable",
    "Setting VLLM_USE_V2_MODEL_RUNNER=0 made it go away.",
    "VLLM_USE_V2_MODEL_RUNNER=1 fixed it for us",
    "`--no-enable-prefix-caching` helps",
    "- mitigated by --pipeline-parallel-size 1",
    "The B200 box shows nothing of it.",
    "Works on H100, on A100 too",
    "We had no speculation and no hybrid model there: num_speculative_tokens=1 was fine",
    "mamba_cache_mode=none never failed",
    "cudagraph_mode NONE and attention_backend TRITON_ATTN are fine",
]


@QUICK
@given(launches, releases, st.sampled_from(WORKAROUNDS), st.booleans())
def test_a_workaround_that_helped_is_not_the_launch(launch, release, words, first):
    """Went wrong: a runner or a GPU that a sentence names was that of the command beside it."""
    text = f"{words}\n{launch}" if first else f"{launch}\n{words}"
    assert cleared(exposure(launch, release), exposure(text, release)) == []


AFTER = [
    " # --no-enable-prefix-caching -pp 1", " && vllm serve x --no-enable-prefix-caching -pp 1",
    "; echo --no-enable-prefix-caching -pp 1", " | tee --no-enable-prefix-caching -pp 1",
    " || vllm serve Qwen/Qwen3.5-27B -pp 1", " & vllm serve Qwen/Qwen3.5-27B --no-enable-prefix-caching",
    " works with --no-enable-prefix-caching -pp 1", " (fine with --no-enable-prefix-caching -pp 1)",
    ", but not with --no-enable-prefix-caching -pp 1",
]  # fmt: skip


@pytest.mark.parametrize("after", AFTER)
def test_what_follows_a_command_on_its_line_is_not_of_it(after):
    """Went wrong: flags of a comment, of the next command and of a sentence overrode those of the launch."""
    assert exposure(SHIFTED, "0.31.0")["pp-align-copy"] == "affected"
    assert exposure(f"{SHIFTED}{after}", "0.31.0")["pp-align-copy"] in ("affected", "unknown")


@pytest.mark.parametrize("joint", ["\n", " && ", "; ", " & ", "\n\n```\n"])
@QUICK
@given(launches, launches, releases)
def test_a_second_command_never_hides_the_first(joint, one, other, release):
    """Went wrong: on one line the flags of both were of the first, and the last of them counted."""
    both = exposure(f"{one}{joint}{other}", release)
    assert cleared(exposure(one, release), both) == []
    assert cleared(exposure(other, release), both) == []


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        ("-pp 1", "-pp 2", "affected"),
        ("-pp 2", "-pp 1", "not-affected"),
        ("--no-enable-prefix-caching", "--enable-prefix-caching", "affected"),
        ("--enable-prefix-caching", "--no-enable-prefix-caching", "not-affected"),
        ("-pp 1", "--pipeline-parallel-size=2", "affected"),
        ("-pp 2", "--pipeline-parallel-size $PP", "unknown"),
        ("-pp 2", "--pipeline-parallel-size +2", "unknown"),
    ],
)
def test_the_last_of_two_contradicting_flags_counts(first, last, expected):
    """Went wrong: a last value that cannot be read, as `+2`, was the default."""
    pipeline = "" if "-pp" in first else "-pp 2"
    assert exposure(f"{HYBRID} {MTP} {pipeline} {first} {last}", "0.31.0")["pp-align-copy"] == expected


def test_a_command_that_a_sentence_quotes_is_no_part_of_another():
    """Went wrong: the launch that fails, quoted in a sentence, joined the one with the flag that helped."""
    text = f"At first it was {SHIFTED} and that broke.\n{SHIFTED} --no-enable-prefix-caching"
    assert exposure(text, "0.31.0")["pp-align-copy"] == "unknown"
    assert len(understand(inputs("x", f"So we ran {SHIFTED}\n{SHIFTED}"), "0.31.0")) == 1


def test_the_last_speculative_config_counts_as_a_whole():
    """Went wrong: a method of the first stayed where the second names only a model, and n-gram is clear."""
    first, last = (
        """-sc '{"method": "ngram"}'""",
        """-sc '{"model": "org/x-dflash", "num_speculative_tokens": 8}'""",
    )
    assert exposure(f"{DENSE} {first}", "0.22.1")["dflash-oob"] == "not-affected"
    assert exposure(f"{DENSE} {first} {last}", "0.22.1")["dflash-oob"] == "unknown"
    assert exposure(f"{DENSE} {last} {first}", "0.22.1")["dflash-oob"] == "not-affected"


@pytest.mark.parametrize(
    "variable", ["VLLM_USE_V2_MODEL_RUNNER=$X", "VLLM_USE_V2_MODEL_RUNNER=", "VLLM_USE_V2_MODEL_RUNNER=maybe"]
)
def test_a_runner_that_cannot_be_read_is_not_the_default(variable):
    """Went wrong: V2 is the default of 0.33.0, and ruled out the race that V1 still has."""
    assert exposure(f"{HYBRID} {MTP}", "0.33.0")["async-accepted-counts"] == "not-affected"
    assert exposure(f"{variable} {HYBRID} {MTP}", "0.33.0")["async-accepted-counts"] == "unknown"


@pytest.mark.parametrize(
    ("words", "flags", "release", "gpu"),
    [
        ("VLLM_USE_TRTLLM_ATTENTION=0", "", "0.28.0", "B200"),
        ("", "--attention-config '{\"use_trtllm_attention\": false}'", "0.28.0", "B200"),
        ("", "--attention-config.use_trtllm_attention=false", "0.28.0", "H100"),
        ("VLLM_ATTENTION_BACKEND=FLASHINFER", "", "0.20.2", "L40S"),
    ],
)
def test_what_decides_and_is_not_read_leaves_it_open(words, flags, release, gpu):
    """Went wrong: what turns a kernel of FlashInfer off was neutral, and the GPU alone ruled the draft loop out."""
    backend = "" if "BACKEND" in words else "--attention-backend FLASHINFER "
    drafts = """-sc '{"method": "mtp", "num_speculative_tokens": 5, "attention_backend": "FLASHINFER"}'"""
    launch = f"{HYBRID} {backend}{drafts if backend else MTP}"
    before = exposure(f"{launch}\nGPU 0: NVIDIA {gpu}\n", release)
    after = exposure(f"{words} {launch} {flags}\nGPU 0: NVIDIA {gpu}\n", release)
    assert (before["mtp-draft-loop"], after["mtp-draft-loop"]) == ("not-affected", "unknown")


def test_the_drafters_model_in_a_log_is_not_the_target():
    """Went wrong: `SpeculativeConfig(…, model='…')` of the engine's line was the served model."""
    line = (
        "LLM engine (v0.31.0) with config: model='Qwen/Qwen3.5-27B', speculative_config=SpeculativeConfig("
        "method='eagle3', model='meta-llama/head', num_spec_tokens=3), pipeline_parallel_size=2"
    )
    (case,) = understand(inputs("log", line))
    assert case.config.model == "Qwen/Qwen3.5-27B"
    assert exposure(line)["pp-align-copy"] == "unknown"


@pytest.mark.parametrize("form", ["({})", "**{}**", "<{}>", "={}=", "0{}", "{}x", "{}.dev1", "{}rc1"])
def test_a_release_that_is_not_read_clears_nothing(form):
    assert (
        cleared(exposure(SHIFTED, "0.31.0"), exposure(f"vLLM version {form.format('0.31.0')}\n{SHIFTED}"))
        == []
    )


@pytest.mark.parametrize("mark", ["\x1b[1m", "\x1b]0;a title\x07", "\x9b0m", "\u202e", "\x1b[0m\r"])
def test_colours_of_a_terminal_are_not_part_of_a_launch(mark):
    """Went wrong: the semicolon in a title's escape ended the command before its flags."""
    assert exposure(SHIFTED.replace(" -pp", f"{mark} -pp"), "0.31.0") == exposure(SHIFTED, "0.31.0")


def test_arguments_as_the_kernel_keeps_them():
    """/proc/PID/cmdline has NUL between arguments."""
    words = [
        "vllm",
        "serve",
        "Qwen/Qwen3.5-27B",
        "-pp",
        "2",
        "-sc.method",
        "mtp",
        "-sc.num_speculative_tokens",
        "3",
        "",
    ]
    assert exposure("\0".join(words), "0.31.0") == exposure(SHIFTED, "0.31.0")


@pytest.mark.parametrize("after", [" # the model", " > log.txt 2>&1 &", " | tee log", " && echo up"])
def test_a_comment_behind_a_backslash_loses_no_flag(after):
    """Went wrong in the large run: the flags on the lines below were cut off with the comment."""
    text = f"{HYBRID} \\{after}\n  -pp 2 \\{after}\n  {MTP}\n"
    assert exposure(text, "0.31.0")["pp-align-copy"] == "affected"
    assert exposure(f"{DENSE}; {text}", "0.31.0")["pp-align-copy"] == "affected"


@pytest.mark.parametrize(
    "line",
    [
        "{}; The B200 box shows nothing of it.",
        "{} & > The B200 box shows nothing of it.",
        "{} && The B200 box shows nothing of it.",
        "The B200 box shows nothing of it. && vllm serve x/y --max-num-seqs 1\n{}",
        "# works on H100 && vllm serve x/y --max-num-seqs 1\n{}",
    ],
)
def test_a_card_that_a_sentence_names_beside_a_command_is_not_its_card(line):
    """It was taken for the launch's, and a card of another family plans nothing on the host."""
    launch = f"{HYBRID} {MTP}"
    assert exposure(launch, "0.23.0")["mtp-draft-loop"] == "unknown"
    assert exposure(line.format(launch), "0.23.0")["mtp-draft-loop"] == "unknown"


def test_flags_below_a_command_that_went_to_the_background_are_its_flags():
    """The line ended at its ampersand, and the drafter below was lost."""
    text = "{} \\ > log.txt 2>&1 &; echo --no-async-scheduling -v\n  {}"
    assert exposure(text.format(HYBRID, MTP), "0.23.0")["async-accepted-counts"] == "affected"
