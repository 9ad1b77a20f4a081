"""Inputs to launches: what goes together is joined, what contradicts each other is judged apart, nothing is guessed."""

import json
import shutil

import pytest
from click.testing import CliRunner

from specmortem import upstream
from specmortem.cli import main
from specmortem.errors import BadInputError, UnavailableError
from specmortem.tools.check.inputs import Input, inputs
from specmortem.tools.check.understand import release_of, understand
from specmortem.upstream import vllm_files
from specmortem.upstream.cache import default_cache
from tests.tools.check.test_inputs import (
    ARGS,
    COLLECTED,
    ENGINES,
    LINE,
    MODEL,
    PLAIN,
    engine,
    inspected,
    plain,
    summary,
)

REAL_CACHE = default_cache()
DFLASH = "vllm serve meta-llama/Llama-3.3-70B-Instruct -sc.method dflash -sc.num_speculative_tokens 15"


def check(*words, given=None):
    return CliRunner().invoke(main, ["check", *map(str, words)], input=given)


def data_of(*words, given=None):
    result = check("--format", "json", *words, given=given)
    assert result.exit_code in (0, 1, 3), result.output
    return json.loads(result.stdout)


def answers(data):
    return {each["incident"]: each["answer"] for each in data["answers"]}


@pytest.fixture
def write(tmp_path):
    def make(**texts):
        paths = [tmp_path / name.replace("_", ".") for name in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text)
        return paths

    return make


def test_a_command_its_environment_and_its_log_are_one_launch(write):
    """The log has no GPU, the environment no launch, the command no release; together they are all of it."""
    env = COLLECTED.replace("VLLM_USE_V2_MODEL_RUNNER=0\n", "")
    data = data_of(*write(run_sh=PLAIN, env_txt=env, serve_log=ARGS))
    understood = data["understood"]
    assert len(data["launches"]) == 1
    assert {name: understood[name]["value"] for name in ("version", "gpu", "pipeline")} == {
        "version": "0.31.0",
        "gpu": 90,
        "pipeline": 2,
    }
    assert answers(data)["pp-align-copy"] == "affected"


def test_a_models_configuration_joins_the_command_that_serves_it():
    """Went wrong: its architecture is another word than the folder's name, so the two were judged apart."""
    config = json.dumps({"architectures": ["MyForCausalLM"], "layer_types": ["linear_attention"]})
    command = f"vllm serve /models/mine -pp 2 {LINE.removeprefix(MODEL)}"
    (case,) = understand([*inputs("run", command), *inputs("config.json", config)], "0.31.0")
    assert (case.config.model, case.config.hybrid, case.name) == ("/models/mine", True, "run + config.json")


def test_a_configuration_joins_none_of_two_models_and_none_that_it_contradicts():
    """Went wrong: it would say of both that they have no recurrent layers."""
    config = inputs(
        "config.json", json.dumps({"architectures": ["MyForCausalLM"], "layer_types": ["full_attention"]})
    )
    two = inputs("run", "vllm serve /models/a\nvllm serve /models/b")
    assert [case.config.hybrid for case in understand([*two, *config], "0.31.0")] == [None, None, False]
    llama = inputs("config.json", json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert len(understand([*inputs("run", PLAIN), *llama], "0.31.0")) == 2


def test_logs_of_two_incidents_give_both(write):
    """Went wrong: two logs together gave a third incident, which neither was."""
    dflash = ARGS.replace(MODEL, "meta-llama/Llama-3.3-70B-Instruct").replace("'mtp'", "'dflash'")
    first = f"{ARGS}\n{engine(ENGINES[0])}\n"
    second = f"INFO 11-02 10:00:00 vLLM API server version 0.24.0\n{dflash.replace('_size: 2', '_size: 1')}\n"
    data = data_of(*write(a_log=first, b_log=second))
    assert [len(data["launches"]), answers(data)["pp-align-copy"]] == [2, "affected"]
    assert answers(data)["dflash-oob"] == "affected"
    apart = {each["name"].rpartition("/")[2]: each for each in data["launches"]}
    assert answers(apart["a.log"])["dflash-oob"] == "not-affected"
    assert answers(apart["b.log"])["pp-align-copy"] == "not-affected"


@pytest.mark.parametrize("first", [True, False])
def test_the_release_given_overrides_what_the_inputs_say(first):
    words = ["--vllm", "0.32.0"]
    data = data_of(
        *(words if first else []), "--launch", f"# vLLM 0.31.0\n{PLAIN}", *([] if first else words)
    )
    assert data["understood"]["version"] == {"value": "0.32.0", "source": "--vllm"}
    assert answers(data)["pp-align-copy"] == "not-affected"


@pytest.mark.parametrize("text", ["0.28.0", "v0.28.0", "vllm==0.28.0", " 0.28.0 "])
def test_spellings_of_a_release(text):
    assert release_of(text) == "0.28.0"


NOTHING = {
    "empty": ("", "nothing in it says how vLLM runs"),
    "a poem": ("roses are red\n", "nothing in it says how vLLM runs"),
    "a README": ("# Tool\nInstall it with pip, then import it.\n", "nothing in it says how vLLM runs"),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_an_input_that_says_nothing_is_one_line_with_the_way_out(kind):
    text, told = NOTHING[kind]
    result = check("-", given=text)
    assert result.exit_code == 2 and not result.stdout
    assert len(result.stderr.strip().splitlines()) == 1
    assert told in result.stderr and "give a launch command" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "nothing to check: give a FILE"),
        (["--vllm", "latest"], "--vllm latest: give a release such as 0.28.0"),
        (["--vllm", "0.28.0", "vllm==0.31.0"], "give one vLLM at a time"),
        (["/no/such/file"], "cannot read /no/such/file"),
        (["--format", "yaml"], "Invalid value for '--format'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, told):
    result = check(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("specmortem: error: ")


@pytest.mark.parametrize("number", [17, 40])
def test_no_launch_is_dropped(number):
    """Went wrong: after sixteen launches, or eight starts in a log, the rest was not looked at."""
    lines = [f"vllm serve meta-llama/Llama-3.3-70B-Instruct --max-num-seqs {n}" for n in range(2, number + 2)]
    found = understand([Input("x", "\n".join([*lines, PLAIN]))], "0.31.0")
    assert summary(found[-1].config) == plain()[0] and len(found) == number + 1
    starts = [ARGS.replace(MODEL, "meta-llama/Llama-3.3-70B-Instruct"), *[ARGS] * 0] * number + [ARGS]
    assert summary(understand([Input("x", "\n".join(starts))], "0.31.0")[-1].config) == plain()[0]


def test_more_launches_than_are_judged_are_refused():
    lines = "\n".join(
        f"vllm serve meta-llama/Llama-3.3-70B-Instruct --max-num-seqs {n}" for n in range(1, 90)
    )
    with pytest.raises(BadInputError, match="launches are more than 64"):
        understand([Input("x", lines)], "0.31.0")


def test_a_container_that_is_inspected_joins_its_environment():
    text = json.dumps(inspected(["vllm", "serve"], ["--model", MODEL, "-pp", "2"], []))
    (case,) = understand([*inputs("inspect", text), Input("env", "GPU 0: NVIDIA H100 80GB HBM3\n")])
    assert (case.config.gpu, case.name) == (90, "inspect + env")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Files of 0.31.0 from the cache, as a checkout; what is not there is not looked for anywhere else."""
    try:
        found = upstream.resolve("vllm==0.31.0", REAL_CACHE)
        upstream.closure_hash(found, vllm_files.V2_SPECULATOR, vllm_files.V2)
    except UnavailableError as error:
        pytest.skip(str(error))
    shutil.copytree(found.root / "vllm", tmp_path / "checkout" / "vllm")
    monkeypatch.setenv("SPECMORTEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "checkout"


OOB = "v2-slot-past-max-len"


@pytest.mark.network
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("spelling", ["--vllm tree:", "--vllm ", "tree:", ""])
def test_a_tree_is_judged_now(tree, spelling):
    data = data_of(*f"{spelling}{tree}".split(), "--launch", f"# vLLM 0.31.0\n{DFLASH}")
    (launch,) = data["launches"]
    assert launch["subject"] == f"tree:{tree}"
    assert answers(launch)["dflash-oob"] in ("affected", "unknown")
    evidence = next(each["evidence"] for each in launch["answers"] if each["incident"] == "dflash-oob")
    assert f"tree:{tree}" in evidence[OOB]


@pytest.mark.network
def test_files_that_a_tree_lacks_are_unknown_or_not_there_and_never_a_verdict_on_record(tmp_path):
    (tmp_path / "vllm" / "v1").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("")
    result = check("--format", "json", "--vllm", f"tree:{tmp_path}", "--launch", f"# vLLM 0.31.0\n{DFLASH}")
    if result.exit_code != 2:
        assert "data/audit.csv" not in result.stdout


def test_installed_without_vllm_says_so():
    result = check("--vllm", "installed", "--launch", PLAIN)
    assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1
    assert "vllm" in result.stderr.lower()


@pytest.mark.parametrize("release", ["0.18.0", "0.34.0", "0.31.0.post9", "1.0.0"])
def test_a_release_that_is_not_on_record_is_never_clean_offline(monkeypatch, tmp_path, release):
    """Nothing can be fetched here: what no probe judged stays unknown, for a launch that reaches every incident."""
    monkeypatch.setenv("SPECMORTEM_CACHE", str(tmp_path))
    monkeypatch.setenv("SPECMORTEM_OFFLINE", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    result = check("--format", "json", "--vllm", release, "--launch", PLAIN)
    assert result.exit_code in (2, 3), result.output
    if result.exit_code == 3:
        assert "not-affected" not in answers(json.loads(result.stdout)).values() or release != "0.18.0"
    else:
        assert len(result.stderr.strip().splitlines()) == 1


def test_a_folder_without_the_files_is_not_judged_and_never_clean(monkeypatch):
    """Its verdict is absent and unavailable at once: the wrong folder was given, not a vLLM without the code."""
    from specmortem import judge
    from specmortem.tools.check.report import judged_now
    from specmortem.verdict import Verdict

    def verdicts(pairs):
        return [
            Verdict.not_judged("no such file", absent="vllm/x.py", unavailable=lost) for lost in (True, False)
        ]

    monkeypatch.setattr(judge, "judge_many", verdicts)
    found = judged_now("tree:/x", ["batch-row-index", "stale-count-none"])
    assert found("batch-row-index").status == "not-judged"
    assert found("stale-count-none").status == "not-present"
