"""Signs state facts, and sentences that deny them do not."""

import pytest

from specmortem.statements import signs
from specmortem.tools.triage import reader
from specmortem.tools.triage.prefixes import records


def facts(line):
    return {str(fact) for record in records(line) for fact in reader.facts_of(record, "f", [(0, 1)])}


@pytest.mark.parametrize(
    "line, fact",
    [
        ("--pipeline-parallel-size 2", "pp=2"),
        ("--pipeline-parallel-size=2", "pp=2"),
        ("pipeline_parallel_size: 2", "pp=2"),
        ('"pipeline_parallel_size": 2,', "pp=2"),
        ("TP=2 PP=4, 1M context", "pp=4"),
        ('{"method":"qwen3_next_mtp","num_speculative_tokens":5}', "method=mtp"),
        ("speculative_config=SpeculativeConfig(method='dflash', num_spec_tokens=15)", "k=15"),
        ("SPEC=dflash2 MAX_SEQS=8", "method=dflash"),
        ("--speculative-model [ngram]", "method=ngram"),
        ("--no-enable-prefix-caching --max-num-seqs 2", "prefix_cache=off"),
        ("--no-async-scheduling --max-num-seqs 2", "async=off"),
        ("Asynchronous scheduling is enabled.", "async=on"),
        ("MTP, async scheduling off", "async=off"),
        ("with prefix caching off", "prefix_cache=off"),
        ("--enforce-eager --max-num-seqs 2", "graphs=eager"),
        ("""--speculative-config '{"method": "mtp", "enforce_eager": true}'""", "draft_graphs=eager"),
        ("--speculative-config.enforce_eager true", "draft_graphs=eager"),
        (
            "non-default args: {'speculative_config': {'method': 'mtp'}, 'enforce_eager': True}",
            "graphs=eager",
        ),
        ("with config: speculative_config=SpeculativeConfig(), enforce_eager=True, seed=0", "graphs=eager"),
        ("-cc.cudagraph_mode=PIECEWISE", "graphs=piecewise"),
        ("--attention-backend FLASH_ATTN", "backend=flash-attn"),
        ("Using FLASHINFER attention backend", "backend=flashinfer"),
        ("Using AttentionBackendEnum.TRITON_ATTN backend.", "backend=triton"),
        ("Using FLASH_ATTN attention backend out of potential backends: []", "chosen_backend=flash-attn"),
        ("--speculative-config.attention_backend FLASHINFER", "draft_backend=flashinfer"),
        (
            """--speculative-config '{"method": "mtp", "attention_backend": "TRITON_ATTN"}'""",
            "draft_backend=triton",
        ),
        (
            "'speculative_config': {'method': 'mtp', 'attention_backend': 'FLASHINFER'}",
            "draft_backend=flashinfer",
        ),
        ("""speculative-config: '{\\"attention_backend\\":\\"FLASH_ATTN\\"}'""", "draft_backend=flash-attn"),
        ("Initializing a V1 LLM engine (v0.22.1rc1.dev3+gabc) with config", "version=0.22.1rc1.dev3+gabc"),
        ("NVRM: Xid (PCI:0000:01:00): 31, pid=5", "xid=31"),
        ("Xid 31 VIRT_WRITE", "access=write"),
        ("device-side assert triggered", "fault=device-assert"),
        ("uncorrectable ECC error encountered", "fault=ecc"),
        ("scheduled_spec_decode_tokens={}", "spec_tokens=empty"),
        ("scheduled_spec_decode_tokens={r: [-1, -1]}", "spec_tokens=placeholders"),
        ("Running: 5 reqs, Waiting: 0 reqs", "running=5"),
        ("kv_cache_usage=0.0437", "kv_usage=4.4"),
        ("completion_tokens=1 finish_reason=stop", "symptom=one-token"),
        ('{"finish_reason": "stop", "completion_tokens": 1, "text": "A"}', "symptom=one-token"),
        ("acceptance 45.6% -> 8%", "symptom=acceptance-collapse"),
        ("the answer goes on: wordwordwordwordwordwordwordword", "symptom=token-loop"),
        ("!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!", "symptom=token-zero"),
        ("#0  precopy_mamba_align_fused_kernel<<<(1,9,4),(128,1,1)>>> ()", "kernel=align-copy"),
    ],
)
def test_a_line_states_a_fact(line, fact):
    assert fact in facts(line)


@pytest.mark.parametrize(
    "line, fact",
    [
        ("It is not OOM.", "fault=oom"),
        ("No Docker OOM kill.", "fault=oom"),
        ("saved logs: no traceback, no illegal memory access, no NaN", "fault=illegal-access"),
        ("Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.", "fault=device-assert"),
        ("grammar_bitmask=array([[      -1,       -1,", "spec_tokens=placeholders"),
        ("without MTP it is fine", "method=mtp"),
        (
            "non-default args: {'speculative_config': {'method': 'mtp', 'enforce_eager': True}}",
            "graphs=eager",
        ),
        ("vllm serve m --speculative-config '{\"enforce_eager\": true}' --seed 1 --port 80", "graphs=eager"),
        ("with enforce_eager=True it is stable", "graphs=eager"),
        ("the trtllm-gen kernels", "engine=tensorrt-llm"),
        ("--no-async-scheduling was never tried", "async=off"),
        ("a sentence of ordinary words, nothing repeated here", "symptom=token-loop"),
    ],
)
def test_a_line_does_not_state_a_fact(line, fact):
    assert fact not in facts(line)


def test_prompts_in_a_log_state_nothing():
    found = reader.read_text(
        "INFO 03-04 10:00:00 [async_llm.py:1] Received request r: prompt: 'MTP illegal memory access Xid 31'\n"
    )
    assert [fact for segment in found for fact in segment.facts] == []


def test_every_sign_has_words_for_the_search_of_large_logs():
    for sign in signs.all_signs().signs:
        assert sign.words, sign
        assert all(word == word.lower() for word in sign.words), sign


def test_the_search_of_large_logs_finds_what_reading_finds():
    line = "(EngineCore pid=3) ERROR 03-04 10:00:00 [core.py:1] CUDA error: an illegal memory access was encountered\n"
    quiet = '(APIServer pid=3) INFO:     "GET /health HTTP/1.1" 200 OK\n' * 20_000
    found = [fact for segment in reader.read_text(quiet + line + quiet) for fact in segment.facts]
    assert ("fault=illegal-access", 20_001) in {(str(fact), fact.line) for fact in found}


def test_a_word_that_is_everywhere_does_not_hide_a_later_fault():
    stats = "INFO 03-04 10:00:00 [loggers.py:1] Running: {} reqs, Waiting: 0 reqs, GPU KV cache usage: 9.0%\n"
    noise = "".join(stats.format(n % 50) for n in range(30_000))
    found = [fact for s in reader.read_text(noise + "Xid 31 VIRT_READ\n" + noise) for fact in s.facts]
    assert ("xid=31", 30_001) in {(str(fact), fact.line) for fact in found}
    assert len(found) < 20_000


def test_what_stands_around_a_first_fault_is_read_with_its_line():
    quiet = 'INFO:     "GET /health HTTP/1.1" 200 OK\n' * 20_000
    text = quiet + "Warp Illegal Address\nnothing\n#0  my_own_kernel<<<(1,1,1),(32,1,1)>>> ()\n" + quiet
    found = [fact for segment in reader.read_text(text) for fact in segment.facts]
    assert ("kernel_dump=my_own_kernel", 20_003) in {(str(fact), fact.line) for fact in found}


def test_a_fault_behind_any_number_of_facts_is_found():
    line = (
        "vLLM 0.22.1 MTP n=4 PP=2 TP=2 garbled tokens under load, EAGLE3 DFlash2, RTX 3090, sm_86, NaN {}\n"
    )
    noise = "".join(line.format(n) for n in range(20_000))
    found = [fact for s in reader.read_text(noise + "Xid 31 VIRT_READ\n" + noise) for fact in s.facts]
    assert ("xid=31", 20_001) in {(str(fact), fact.line) for fact in found}


def test_a_sentence_over_several_lines_keeps_the_line_of_each_fact():
    text = (
        "It happens only when two requests run at the same time\n"
        "and never shows with one request at a time,\nunder MTP.\n"
    )
    found = {(str(fact), fact.line) for segment in reader.read_text(text) for fact in segment.facts}
    assert {("control.one-request=clean", 1), ("method=mtp", 3), ("concurrency=many", 1)} <= found


def test_lines_of_a_list_are_not_joined():
    found = reader.read_text("Hardware: 2x H100\nvLLM 0.22.1\nMTP\n")
    assert {(str(f), f.line) for s in found for f in s.facts} >= {("version=0.22.1", 2), ("method=mtp", 3)}
