"""One launch in every form that people keep it in; each gives what the same launch gives as a plain command."""

import gzip
import json
import resource
import sys
import time

import pytest
import yaml

from specmortem.affected.answers import answer
from specmortem.errors import BadInputError
from specmortem.tools.check import inputs as inputs_module
from specmortem.tools.check.inputs import inputs, read
from specmortem.tools.check.understand import understand

RELEASE = "0.31.0"
JSON = '{"method": "mtp", "num_speculative_tokens": 3}'
MODEL = "Qwen/Qwen3.5-27B"
FLAGS = ["--speculative-config", JSON, "-pp", "2"]
LINE = f"{MODEL} --speculative-config '{JSON}' -pp 2"
PLAIN = f"vllm serve {LINE}"
IMAGE = f"vllm/vllm-openai:v{RELEASE}"
V1 = "VLLM_USE_V2_MODEL_RUNNER"


def judged(text, release=""):
    """Every launch of a text: version, model, runner where given, and the answer of each incident."""
    return [summary(case.config) for case in understand(inputs("x", text), release)]


def summary(config):
    found = answer(config)
    return (
        config.version,
        config.model.rpartition("/")[2],
        config.runner,
        config.complete,
        {one.incident: (one.answer, tuple(cause.cause for cause in one.deciding)) for one in found.incidents},
    )


def plain(command=PLAIN, release=RELEASE):
    return judged(command, release)


def escaped(text):
    return text.replace('"', '\\"')


def compose(**service):
    return yaml.safe_dump({"services": {"server": {"image": IMAGE, **service}}})


def kubernetes(**container):
    pod = {"containers": [{"name": "server", "image": IMAGE, **container}]}
    return yaml.safe_dump(
        {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": {"spec": pod}}}
    )


def inspected(entrypoint, cmd, env):
    config = {"Image": IMAGE, "Env": env, "Cmd": cmd, "Entrypoint": entrypoint}
    return [{"Id": "a1", "Path": entrypoint[0], "Args": [*entrypoint[1:], *cmd], "Config": config}]


SAME = {
    "docker run": f"docker run --gpus all -p 80:8000 --ipc=host -v ~/c:/root/c {IMAGE} --model {LINE}",
    "docker run, model first": f"docker run --rm {IMAGE} {LINE}",
    "docker run over lines": f"docker run --gpus all \\\n  --ipc=host \\\n  {IMAGE} \\\n  --model {LINE}\n",
    "a registry of one's own": f"podman run registry.example.com:5000/{IMAGE} --model {LINE}",
    "compose, a string": compose(command=f"--model {LINE}"),
    "compose, a list": compose(command=["--model", MODEL, *FLAGS]),
    "compose, flags with =": compose(command=[f"--model={MODEL}", f"--speculative-config={JSON}", "-pp=2"]),
    "compose, folded": f"services:\n  a:\n    image: {IMAGE}\n    command: >\n      --model {MODEL}\n"
    f"      --speculative-config '{JSON}'\n      -pp 2\n",
    "compose, a script": compose(
        entrypoint=["sh", "-c"],
        command=[f"set -e\nvllm serve {MODEL} \\\n  --speculative-config '{JSON}' \\\n  -pp 2\n"],
    ),
    "compose, sh -c in a string": compose(command=f"sh -c \"vllm serve {escaped(LINE)}\""),
    "compose, an anchor": f"x-base: &base\n  image: {IMAGE}\nservices:\n  a:\n    <<: *base\n"
    f'    command: "--model {escaped(LINE)}"\n',
    "Kubernetes, args": kubernetes(args=["--model", MODEL, *FLAGS]),
    "Kubernetes, command and args": kubernetes(command=["vllm", "serve"], args=[MODEL, *FLAGS]),
    "Kubernetes, the server's module": kubernetes(
        command=["python3", "-m", "vllm.entrypoints.openai.api_server"], args=["--model", MODEL, *FLAGS]
    ),
    "Kubernetes, a shell": kubernetes(command=["/bin/sh", "-c"], args=[f"exec {PLAIN}"]),
    "Kubernetes, $(NAME)": kubernetes(
        args=["--model", "$(MODEL)", *FLAGS], env=[{"name": "MODEL", "value": MODEL}]
    ),
    "Kubernetes, JSON": json.dumps(yaml.safe_load(kubernetes(args=["--model", MODEL, *FLAGS]))),
    "docker inspect": json.dumps(inspected(["vllm", "serve"], ["--model", MODEL, *FLAGS], ["PATH=/bin"]), indent=4),
    "docker inspect, one line": json.dumps(inspected(["vllm", "serve"], [MODEL, *FLAGS], [])),
}  # fmt: skip
SAME_ON_A_RELEASE = {
    "systemd": f"[Service]\nExecStart=/opt/vllm/bin/vllm serve {MODEL} --speculative-config '{JSON}' \\\n  -pp 2\n",
    "systemd, bash -c": f"[Service]\nExecStart=/bin/bash -c 'vllm serve {MODEL} --speculative-config "
    f"\"{escaped(JSON)}\" -pp 2'\n",
    "double quotes": f'vllm serve {MODEL} --speculative-config "{escaped(JSON)}" -pp 2',
    "a prompt, nohup and a redirect": f"$ source v/bin/activate && nohup {PLAIN} > log 2>&1 &",
    "Windows line ends": PLAIN.replace(" --", " \\\r\n --") + "\r\n",
    "a fence": f"```\r\n{PLAIN}\r\n```\r\n",
    "NUL bytes around it": f"\0\0\n{PLAIN}\n\0",
}  # fmt: skip


@pytest.mark.parametrize("form", SAME)
def test_a_form_that_names_the_release_gives_what_the_plain_command_gives(form):
    """Went wrong: the image's model was not read, escaped JSON was not, a container's Args were a second launch."""
    assert judged(SAME[form]) == plain()


@pytest.mark.parametrize("form", SAME_ON_A_RELEASE)
def test_a_form_without_release_gives_what_the_plain_command_gives(form):
    assert judged(SAME_ON_A_RELEASE[form], RELEASE) == plain()


def test_another_launch_gives_something_else():
    assert judged(SAME["docker run"].replace("-pp 2", "-pp 1")) != plain()


ON_V1 = {
    "docker run -e": f"docker run -e {V1}=0 {IMAGE} --model {LINE}",
    "docker run --env=": f"docker run --env={V1}=0 {IMAGE} --model {LINE}",
    "docker run -e, quoted": f'docker run -e "{V1}=0" {IMAGE} --model {LINE}',
    "compose, mapping": compose(command=["--model", MODEL, *FLAGS], environment={V1: "0"}),
    "compose, list": compose(command=["--model", MODEL, *FLAGS], environment=[f"{V1}=0"]),
    "compose, a script": compose(
        entrypoint=["sh", "-c"], command=[f"set -e\n{PLAIN}\n"], environment={V1: "0"}
    ),
    "Kubernetes": kubernetes(args=["--model", MODEL, *FLAGS], env=[{"name": V1, "value": "0"}]),
    "docker inspect": json.dumps(inspected(["vllm", "serve"], ["--model", MODEL, *FLAGS], [f"{V1}=0"])),
    "systemd": f"# vLLM {RELEASE}\n[Service]\nEnvironment={V1}=0\nExecStart=/usr/bin/{PLAIN}\n",
}


@pytest.mark.parametrize("form", ON_V1)
def test_variables_of_a_container_count(form):
    """Went wrong: `docker run -e NAME=VALUE` was skipped, so V1 by hand was judged as the default."""
    assert judged(ON_V1[form]) == plain(f"{V1}=0 {PLAIN}")


LEFT_OPEN = {
    "valueFrom": kubernetes(
        args=["--model", MODEL, *FLAGS], env=[{"name": V1, "valueFrom": {"configMapKeyRef": {"name": "a"}}}]
    ),
    "envFrom": kubernetes(args=["--model", MODEL, *FLAGS], envFrom=[{"configMapRef": {"name": "a"}}]),
    "env_file": compose(command=["--model", MODEL, *FLAGS], env_file=".env"),
    "null": compose(command=["--model", MODEL, *FLAGS], environment={V1: None}),
    "passed on": f"docker run -e {V1} {IMAGE} --model {LINE}",
    "--env-file": f"docker run --env-file vllm.env {IMAGE} --model {LINE}",
    "EnvironmentFile": f"# vLLM {RELEASE}\n[Service]\nEnvironmentFile=/etc/vllm\nExecStart=/usr/bin/{PLAIN}\n",
    "$": f"# vLLM {RELEASE}\n{V1}=$RUNNER {PLAIN}",
}


@pytest.mark.parametrize("form", LEFT_OPEN)
def test_a_variable_whose_value_stands_elsewhere_is_no_default(form):
    """Went wrong: it was read as not given, and the default of the release ruled causes of the other runner out."""
    (_, _, runner, complete, answers), *_ = judged(
        LEFT_OPEN[form].replace("-pp 2", "").replace('"-pp", "2"', "")
    )
    assert (runner, complete) == (None, False)
    assert "not-affected" not in {answers[slug][0] for slug in ("async-accepted-counts", "pp-align-copy")}


def test_containers_are_judged_apart():
    """Went wrong: the runner of one container was that of all, and every image's release was judged with each."""
    first = {
        "image": IMAGE,
        "environment": {V1: "0"},
        "command": ["--model", "meta-llama/Llama-3.3-70B-Instruct"],
    }
    second = {"image": "vllm/vllm-openai:v0.23.0", "command": ["--model", MODEL, *FLAGS[:2]]}
    third = {"image": "nginx:1.29", "command": ["nginx", "-g", "daemon off;"]}
    found = judged(yaml.safe_dump({"services": {"a": first, "b": second, "c": third}}))
    assert sorted(found, key=str) == sorted(
        [
            *plain(f"{V1}=0 vllm serve meta-llama/Llama-3.3-70B-Instruct"),
            *plain(f"vllm serve {MODEL} --speculative-config '{JSON}'", "0.23.0"),
        ],
        key=str,
    )


COLLECTED = f"""Collecting environment information...
OS                           : Ubuntu 22.04.5 LTS (x86_64)
PyTorch version              : 2.9.0+cu128
GPU models and configuration :
GPU 0: NVIDIA H100 80GB HBM3
vLLM Version                 : {RELEASE}
CUDA Archs: Not Set; ROCm: Disabled
VLLM_USE_V2_MODEL_RUNNER=0
NVIDIA_VISIBLE_DEVICES=all
"""


def test_collect_env_gives_release_gpu_and_runner():
    (case,) = understand(inputs("env.txt", COLLECTED))
    assert (case.config.version, case.config.gpu, case.config.runner) == (RELEASE, 90, "v1")


ARGS = (
    f"(APIServer pid=1) INFO 11-02 10:00:00 [utils.py:233] non-default args: {{'model_tag': '{MODEL}', 'model': "
    f"'{MODEL}', 'pipeline_parallel_size': 2, 'speculative_config': {{'method': 'mtp', 'num_speculative_tokens': 3}}}}"
)


def engine(words):
    return (
        f"(EngineCore_DP0 pid=2) INFO 11-02 10:00:10 [core.py:77] {words} (v{RELEASE}) with config: model='{MODEL}', "
        "speculative_config=SpeculativeConfig(method='mtp', model='x', num_spec_tokens=3), tokenizer='x', "
        "tensor_parallel_size=1, pipeline_parallel_size=2, enforce_eager=False, kv_cache_dtype=auto, "
        "enable_prefix_caching=True, compilation_config={'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>}"
    )


ENGINES = ("Initializing a V1 LLM engine", "Dumping input data for V1 LLM engine")


@pytest.mark.parametrize("words", ENGINES)
def test_a_log_of_the_start_gives_what_the_command_gives(words):
    assert judged(f"{ARGS}\n{engine(words)}\n") == plain()


@pytest.mark.parametrize("words", ENGINES)
def test_the_line_of_the_engine_alone_leaves_open_what_it_does_not_print(words):
    """Went wrong: it counted as a whole command, though it prints no block size, so `--block-size 128` was clear."""
    ((version, model, _, complete, answers),) = judged(engine(words))
    assert (version, model, complete) == (RELEASE, "Qwen3.5-27B", False)
    assert answers["pp-align-copy"][0] == "unknown"


LAYERS = ["linear_attention", "linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["MyForCausalLM"], "layer_types": LAYERS}, (True, False, "")),
        ({"architectures": ["MyVL"], "text_config": {"layer_types": LAYERS}}, (True, False, "")),
        ({"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-M*"}, (True, False, "")),
        ({"architectures": ["MyForCausalLM"], "layer_types": ["full_attention"]}, (False, False, "")),
        ({"architectures": ["MyForCausalLM"], "layer_types": ["something_new"]}, (None, False, "")),
        ({"architectures": ["MyForCausalLM"], "layer_types": [["x"], {"a": 1}]}, (None, False, "")),
        (
            {"architectures": ["Eagle3"], "speculators_config": {"algorithm": "eagle3"}},
            (None, True, "eagle3"),
        ),
        ({"architectures": ["X"], "speculators_config": {}}, (None, True, "unnamed")),
    ],
)
def test_a_models_configuration(config, expected):
    (case,) = understand(inputs("config.json", json.dumps(config, indent=2)))
    assert (case.config.hybrid, case.config.own_drafter, case.config.speculation) == expected


def test_a_configuration_with_a_drafter_is_of_the_model_that_it_drafts_for():
    """Went wrong: the drafter's architecture was taken for the served model."""
    own = {
        "algorithm": "eagle3",
        "proposal_methods": [{"speculative_tokens": 5}],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B"},
    }
    (case,) = understand(
        inputs("c", json.dumps({"architectures": ["Eagle3Speculator"], "speculators_config": own}))
    )
    assert (case.config.model, case.config.drafts, case.config.speculation) == ("Qwen/Qwen3-8B", 5, "eagle3")


def test_a_drafters_configuration_says_nothing_of_the_target():
    """Went wrong: Llama in the drafter's architecture made the target a model without recurrent layers."""
    text = json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "layer_types": ["full_attention"]})
    (case,) = understand([*inputs("run", "vllm serve /models/mine"), *inputs("config.json", text)], RELEASE)
    assert (case.config.hybrid, case.config.own_drafter) == (None, None)


PACKED = {
    "gzip": gzip.compress,
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "UTF-16 without a mark": lambda data: data.decode().encode("utf-16-le"),
    "UTF-8 with a mark": lambda data: b"\xef\xbb\xbf" + data,
    "Windows line ends": lambda data: data.replace(b"\n", b"\r\n"),
    "NUL bytes": lambda data: b"\0" * 300 + b"\n" + data,
    "bytes that are no UTF-8": lambda data: b"\xff\xfe\xfd\n"[1:] + data,
}


@pytest.mark.parametrize("how", [*PACKED, "zstd"])
def test_a_file_in_any_packing(tmp_path, how):
    path = tmp_path / "serve.log"
    data = f"{ARGS}\n{engine(ENGINES[0])}\n".encode()
    pack = PACKED.get(how) or pytest.importorskip("zstandard").ZstdCompressor().compress
    path.write_bytes(pack(data))
    assert [summary(case.config) for case in understand(read(str(path)))] == plain()


def test_a_damaged_archive_is_one_line(tmp_path):
    path = tmp_path / "serve.log.gz"
    path.write_bytes(gzip.compress(PLAIN.encode())[:-6])
    with pytest.raises(BadInputError, match="is a damaged gzip file") as error:
        read(str(path))
    assert "\n" not in str(error.value)


def test_a_long_log_takes_little_memory_and_what_decides_may_stand_at_its_end(tmp_path, monkeypatch):
    """A tenth of 200 MB, with the bound on what is kept a tenth too; the file is never held as a whole."""
    monkeypatch.setattr(inputs_module, "READ_WHOLE", 1 << 19)
    path, size = tmp_path / "long.log", 20 << 20
    filler = b"INFO 11-02 10:00:01 [loggers.py:257] Engine 000: Running: 3 reqs, Waiting: 0 reqs\n" * 1000
    with path.open("wb") as stream:
        while stream.tell() < size:
            stream.write(filler)
        stream.write(f"{ARGS}\n{engine(ENGINES[0])}\n".encode())
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = [summary(case.config) for case in understand(read(str(path)))]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert found == plain()
    assert time.process_time() - began < 15
    assert grown < size // 2, f"{grown >> 20} MiB more"


def bomb(levels, wide=9):
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * wide)}]" for n in range(1, levels)]
    return "\n".join(
        [*lines, f"services: {{v: {{image: {IMAGE}, command: *a{levels - 1}, environment: *a{levels - 1}}}}}"]
    )


def merging(levels, wide=9):
    lines = ["a0: &a0 {x: y}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * wide)}]}}" for n in range(1, levels)]
    return "\n".join(
        [
            *lines,
            f"services: {{v: {{<<: *a{levels - 1}, image: {IMAGE}, command: '{PLAIN.split(' --')[0]}'}}}}",
        ]
    )


HOSTILE = {
    "aliases": bomb(30),
    "merges": merging(30),
    "an alias to itself": f"a: &a [*a]\nimage: {IMAGE}\ncommand: *a\n",
    "deep lists": f"image: {IMAGE}\ncommand: {'[' * 50_000}",
    "deep mappings": "\n".join(f"{' ' * n}image:" for n in range(3000)) + f" {IMAGE}",
    "deep JSON": f'{{"image": "{IMAGE}", "args": {"[" * 100_000}',
    "deep JSON of a model": f'{{"architectures": {"[" * 100_000}',
    "invalid": f"image: {IMAGE}\ncommand: [\n  - 'x\n",
    "tabs": f"services:\n\ta:\n\t\timage: {IMAGE}\n\t\tcommand: --model {MODEL}\n",
    "tags": f"image: {IMAGE}\ncommand: !!python/object/apply:os.system ['touch /tmp/never']\n",
    "no text as key": f"? [a, b]\n: c\nimage: {IMAGE}\nargs: ['--model', x]\n",
    "numbers": f"image: {IMAGE}\nargs: [1, 1e400, {'9' * 6000}, 0x1F, 12:30:45, 2024-01-01, ~, yes]\n",
    "many documents": f"---\nimage: {IMAGE}\nargs: ['--model', x]\n" * 2000,
    "wide": f"image: {IMAGE}\nargs: [{', '.join(['a'] * 60_000)}]\n",
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_service_files_end_soon_and_are_never_cleared(kind):
    """Went wrong: nested merges doubled at each level without end, and invalid YAML lost the flags that it held."""
    began = time.process_time()
    try:
        found = judged(HOSTILE[kind])
    except BadInputError:
        found = []
    assert time.process_time() - began < 8
    assert all(answers["pp-align-copy"][0] != "not-affected" for *_, answers in found)


def test_an_invalid_compose_file_keeps_what_it_says():
    """`command: --speculative-config '{"method": …}'` is no YAML, since a plain word holds no colon and space."""
    text = f"services:\n  a:\n    image: {IMAGE}\n    command: --model {LINE}\n"
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load(text)
    ((version, model, _, complete, answers),) = judged(text)
    assert (version, model, complete) == (RELEASE, "Qwen3.5-27B", False)
    assert answers["pp-align-copy"][0] == "unknown"


def test_standard_input(monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PLAIN.encode())))
    (found,) = read("-")
    assert (found.name, found.text) == ("stdin", PLAIN)
