"""`pdkv explain LOG`: the printed capacity recomputed to the block, and findings whose numbers can be checked by hand."""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.explain.models import gemma_12b, llama_3b, llama_8b
from tests.logs import samples

from pdkv.errors import ConfigError
from pdkv.explain.compare import compare
from pdkv.explain.report import Explanation, Finding, Severity
from pdkv.explain.sources import Directory, explain_log, explain_sources
from pdkv.explain.start import read_start
from pdkv.explain.startup import explain_start
from pdkv.logs.parser import read_startup_log
from pdkv.models.families import spec_from_config
from pdkv.models.spec import ModelSpec
from pdkv.units import GIB

SAMPLES = {
    **{name: text for name, text in vars(samples).items() if name.isupper()},
    "SHARED": samples.V1_0_7
    + "ValueError: Free memory on device cuda:1 (60.87/79.19 GiB) on startup is less than desired GPU memory utilization "
    "(0.95, 75.23 GiB). Decrease GPU memory utilization\n",
    "SAMPLER": samples.V1_0_32
    + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 1 has a total capacity of 79.19 GiB "
    "of which 298.50 MiB is free. Including non-PyTorch memory, this process has 78.89 GiB memory in use.\n"
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.\n",
}
"""Logs by name, those of failures that only GPUs have included."""


def explained(text: str, spec: ModelSpec | None = None) -> Explanation:
    return explain_start("test", read_startup_log(io.BytesIO(text.encode())), spec)


def finding(answer: Explanation, name: str) -> Finding:
    found = {item.id: item for item in answer.findings}
    assert name in found, sorted(found)
    return found[name]


def ids(answer: Explanation) -> set[str]:
    return {item.id for item in answer.findings}


@pytest.mark.parametrize(
    ("name", "spec", "blocks", "block_bytes", "groups", "per_request"),
    [
        ("meta-llama-llama-3-1-8b---h100-80gb--tp1pp1dp1--8192.log", llama_8b(), 29751, 2097152, 1, 512),
        ("meta-llama-llama-3--h100-80gb--tp1pp1dp1--8192-dtf32.log", llama_8b(), 10956, 4194304, 1, 512),
        ("meta-llama-llama-3-1-8b---h100-80gb--tp1pp2dp1--8192.log", llama_8b(), 67207, 1048576, 1, 512),
        ("meta-llama-llama-3-1-8b---h100-80gb--tp4pp1dp1--8192.log", llama_8b(), 138112, 524288, 1, 512),
        ("meta-llama-llama-3-1-8b--h100-80gb--tp1pp1dp1--32768.log", llama_8b(), 29751, 2097152, 1, 2048),
        ("google-gemma-3-12b-it--h100-80gb--tp1pp1dp1--8192.log", gemma_12b(), 48867, 1048576, 6, 3077),
    ],
)
def test_real_logs_are_recomputed_to_the_block(
    shared: Path, name: str, spec: ModelSpec, blocks: int, block_bytes: int, groups: int, per_request: int
) -> None:
    answer = explain_log(str(shared / "field" / "logs" / name), spec)
    assert answer.agrees is True
    numbers = answer.recomputed
    assert numbers is not None
    assert (numbers.num_blocks, numbers.num_blocks_low) == (blocks, blocks)
    assert (numbers.bytes_per_block, len(numbers.groups)) == (block_bytes, groups)
    assert numbers.blocks_per_max_len_request == per_request
    assert numbers.kv_cache_size_tokens == answer.observed["kv_cache_size_tokens"]


def test_without_the_debug_line_the_rounded_memory_leaves_a_range_that_holds_the_truth(shared: Path) -> None:
    path = shared / "field" / "logs" / "google-gemma-3-12b-it--h100-80gb--tp1pp1dp1--8192.log"
    lines = [line for line in path.read_text().splitlines() if "num_gpu_blocks is" not in line]
    numbers = explained("\n".join(lines), gemma_12b()).recomputed
    assert numbers is not None
    assert numbers.num_blocks_low == 48864
    assert numbers.num_blocks == numbers.num_blocks_high == 48869


def test_a_log_of_another_model_does_not_agree(shared: Path) -> None:
    name = "meta-llama-llama-3-1-8b---h100-80gb--tp1pp1dp1--8192.log"
    answer = explain_log(str(shared / "field" / "logs" / name), llama_3b())
    assert answer.agrees is False
    assert finding(answer, "printed-capacity-differs").severity is Severity.WARNING
    assert not {"null-block", "block-rounding"} & ids(answer)


def test_one_changed_digit_is_noticed() -> None:
    """The recomputation must be able to fail: one block more or less is enough."""
    log = """\
(EngineCore pid=1) INFO [core.py:1] Initializing a V1 LLM engine (v0.19.0) with config: model='m', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, kv_cache_dtype=auto)
(EngineCore pid=1) INFO [gpu_worker.py:1] Available KV cache memory: 58.11 GiB
(EngineCore pid=1) INFO [kv_cache_utils.py:1] GPU KV cache size: {tokens} tokens
(EngineCore pid=1) INFO [kv_cache_utils.py:1] Maximum concurrency for 8,192 tokens per request: {times}x
"""
    assert explained(log.format(tokens="476,016", times="58.11"), llama_8b()).agrees is True
    assert explained(log.format(tokens="476,015", times="58.11"), llama_8b()).agrees is False
    assert explained(log.format(tokens="476,016", times="58.12"), llama_8b()).agrees is False
    # 29,755 blocks are more than 58.115 GiB hold.
    assert explained(log.format(tokens="476,080", times="58.12"), llama_8b()).agrees is False


def test_the_032_line_means_concurrency_times_length() -> None:
    log = """\
(EngineCore pid=1) INFO [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: model='m', dtype=torch.bfloat16, max_seq_len=131072, tensor_parallel_size=1, kv_cache_dtype=auto)
INFO Chunked prefill is enabled with max_num_batched_tokens=8192.
(EngineCore pid=1) INFO [gpu_worker.py:1] Available KV cache memory: 40.0 GiB
(EngineCore pid=1) INFO GPU KV cache size: {tokens:,} tokens, Maximum concurrency for 131,072 tokens per request: {times:.2f}x
"""
    # Two steps in flight: 1,023 + 2 x 8,192 tokens of window and one block more in each of five groups, and the full one.
    times = 40 * 1024 / (5 * (17_407 // 16 + 2) + 131_072 // 16)
    answer = explained(log.format(tokens=int(times * 131_072), times=times), gemma_12b())
    assert answer.agrees is True, answer.findings
    assert "concurrency x length" in finding(answer, "kv-cache-size-meaning").text
    # A decoding request keeps 65 blocks of each of the five window groups and 8,192 of the full one.
    assert "holds 8,517 blocks" in finding(answer, "window-reserve").text


def test_the_slowest_stage_is_named_with_what_the_other_leaves_unused(shared: Path) -> None:
    name = "meta-llama-llama-3-1-8b---h100-80gb--tp1pp2dp1--8192.log"
    item = finding(explain_log(str(shared / "field" / "logs" / name), llama_8b()), "bottleneck-rank")
    assert item.text.startswith("PP1 has the least room")
    # 66.54 GiB less 67,207 blocks of 1 MiB, within the rounding.
    assert item.bytes == pytest.approx(66.54 * GIB - 67207 * 2**20, abs=GIB / 100)


def test_unknown_ranks_explain_a_smaller_pool() -> None:
    log = samples.V1_0_9.replace("(VllmWorker rank=1 pid=201) INFO 06-01 00:00:50 [gpu_worker.py:227] Available", "")
    log = log.replace("v0.9.1", "v0.11.0").replace("kv_cache_dtype=fp8", "kv_cache_dtype=auto")
    answer = explained(log.replace("178,880", "200,000").replace("1.36x", "1.53x"), llama_8b())
    assert answer.agrees is None
    # 12.565 GiB hold 12,866 blocks of 1 MiB on each of two ranks; 200,000 tokens are 12,500.
    assert finding(answer, "another-rank-had-less").bytes == (12866 - 12500) * 2**20


def test_settings_that_the_log_leaves_out_are_found_by_what_it_prints() -> None:
    log = """\
INFO GPU KV cache size: 130,304 tokens
INFO Maximum concurrency for 8,192 tokens per request: 15.88x
INFO Available KV cache memory: 47.72 GiB
"""
    answer = explained(log, gemma_12b())
    assert answer.agrees is True
    assert "max_num_batched_tokens 8192" in finding(answer, "assumed").text


def test_a_cpu_makes_blocks_of_its_own_size() -> None:
    """That server's /metrics said 4,096 blocks of 128 tokens."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 128, "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    answer = explained(samples.V1_0_32_CPU, spec_from_config(config, name="tiny"))
    assert answer.agrees is True
    assert answer.recomputed is not None
    assert (answer.recomputed.num_blocks, answer.recomputed.block_size) == (4096, 128)


CONNECTOR = """\
(EngineCore pid=1) INFO [utils.py:1] non-default args: {{'kv_transfer_config': KVTransferConfig(kv_connector='NixlConnector', kv_role='kv_both')}}
(EngineCore pid=1) INFO [core.py:1] Initializing a V1 LLM engine (v0.18.0) with config: model='m', dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=1, kv_cache_dtype=auto)
INFO Chunked prefill is enabled with max_num_batched_tokens=8192.
(EngineCore pid=1) INFO [gpu_worker.py:1] Available KV cache memory: 40.0 GiB
(EngineCore pid=1) INFO GPU KV cache size: {tokens:,} tokens
(EngineCore pid=1) INFO Maximum concurrency for 32,768 tokens per request: {times:.2f}x
"""


def test_a_connector_that_switches_the_hybrid_manager_off_without_a_word() -> None:
    """All 48 layers in full: 40 GiB are 6,826 blocks of 6 MiB. With the hybrid manager: 40,960 of 1 MiB in six groups."""
    answer = explained(CONNECTOR.format(tokens=6826 * 16, times=6826 / 2048), gemma_12b())
    assert answer.agrees is True
    assert answer.recomputed is not None
    assert len(answer.recomputed.groups) == 1
    price = finding(answer, "hybrid-manager-off").text
    assert f"where {40_960 / (2048 + 5 * 577):.2f} would fit" in price
    on = explained(CONNECTOR.format(tokens=40_960 // 6 * 16, times=40_960 / (2048 + 5 * 577)), gemma_12b())
    assert on.agrees is True
    assert "hybrid-manager-off" not in ids(on)


def test_a_draft_that_is_part_of_the_model_keeps_a_layer_of_its_own() -> None:
    log = samples.V1_0_9.replace("v0.9.1", "v0.19.0").replace("kv_cache_dtype=fp8", "kv_cache_dtype=auto")
    log = log.replace(
        "model='m',", "model='m', speculative_config=SpeculativeConfig(method='mtp', model='m', num_spec_tokens=1),"
    )
    numbers = explained(log, llama_8b()).recomputed
    assert numbers is not None
    assert numbers.bytes_per_block == 33 * 4 * 128 * 2 * 2 * 16


def test_engines_of_a_data_parallel_start_are_added_up() -> None:
    second = "(EngineCore_DP1 pid=9) INFO [kv_cache_utils.py:1] GPU KV cache size: {:,} tokens\n"
    assert (
        "357,760 tokens together" in finding(explained(samples.V1_0_9 + second.format(178_880)), "several-engines").text
    )
    assert finding(explained(samples.V1_0_9 + second.format(178_000)), "engines-differ").severity is Severity.WARNING


# ------------------------------------------------------------------------------------------------------- failed starts


def real(shared: Path, name: str, spec: ModelSpec | None = None) -> Explanation:
    return explain_log(str(shared / "field" / "logs" / name), spec)


def test_a_device_in_use_names_the_largest_share_that_starts(shared: Path) -> None:
    answer = real(shared, "codellama-codellama-34b---h100-80gb--tp2pp1dp1--8192.FAILED.log")
    assert finding(answer, "failed-device-memory-in-use").text.startswith("GPU 1 had 60.87 GiB of 79.19 GiB free")
    share = float(finding(answer, "smallest-change").text.rsplit(" ", 1)[1])
    assert share * 79.19 <= 60.87 < (share + 0.01) * 79.19


def test_sampler_memory_gives_the_sequences_that_fit(shared: Path) -> None:
    answer = real(shared, "openai-gpt-oss-20b--h100-80gb--tp2pp1dp1--8192.FAILED.log")
    change = finding(answer, "smallest-change").text
    sequences = int(change.rsplit(" ", 1)[1])
    assert sequences * 786 / 1024 <= 298.5 < (sequences + 8) * 786 / 1024


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("microsoft-phi-2--h100-80gb--tp1pp1dp1--8192.FAILED.log", "--max-model-len 2048"),
        ("meta-llama-llama-3-1-8b---h100-80gb--tp1pp1dp2--8192.FAILED.log", "give the container 2 GPUs"),
        ("google-gemma-3-4b-it--h100-80gb--tp1pp1dp1--8192.FAILED.log", "give a token with access"),
    ],
)
def test_other_failures_say_what_to_change(shared: Path, name: str, change: str) -> None:
    assert finding(real(shared, name), "smallest-change").text.startswith(change)


def test_a_request_that_does_not_fit_gets_every_way_out() -> None:
    answer = explained(samples.TOO_LONG, llama_3b())
    assert answer.recomputed is not None
    assert answer.recomputed.needed_bytes == 14 * GIB
    ways = [item.text for item in answer.findings if item.id in ("smallest-change", "other-change")]
    assert ways == ["--kv-cache-dtype fp8", "--max-model-len 117392 (or auto)"]


def test_more_of_the_device_comes_first_where_it_is_free() -> None:
    log = samples.TOO_LONG.replace(
        "(EngineCore_DP0 pid=7) INFO 10-01 00:01:00",
        "(EngineCore_DP0 pid=7) DEBUG worker init memory snapshot: torch_peak=0.0GiB, free_memory=21.8GiB, "
        "total_memory=22.03GiB, cuda_memory=0.2GiB\n"
        "(EngineCore_DP0 pid=7) DEBUG Initial free memory: 21.8 GiB; Requested memory: 0.850000 (util), 18.73 GiB\n"
        "(EngineCore_DP0 pid=7) INFO 10-01 00:01:00",
        1,
    )
    text = finding(explained(log, llama_3b()), "smallest-change").text
    share = float(text.removeprefix("--gpu-memory-utilization "))
    assert (share - 0.85) * 22.03 >= 14.0 - 12.54
    assert share * 22.03 <= 21.8


def test_more_sequences_than_states() -> None:
    log = (
        samples.V1_0_7 + "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (614). Each decode ...\n"
    )
    assert finding(explained(log), "smallest-change").text == "--max-num-seqs 614"


# -------------------------------------------------------------------------------------------------------------- sources


def test_a_directory_is_explained_log_by_log(shared: Path) -> None:
    answer = explain_sources([str(shared / "field" / "logs")])
    assert isinstance(answer, Directory)
    assert len(answer.starts) == 35
    assert not answer.refused


def test_every_real_log_that_was_sized_agrees_by_the_name_it_gives(shared: Path) -> None:
    """No --model: 29 starts printed a capacity, and the catalogue knows them all."""
    answer = explain_sources([str(shared / "field" / "logs")])
    assert isinstance(answer, Directory)
    sized = [start for start in answer.starts if start.observed["kv_cache_size_tokens"] is not None]
    assert len(sized) == 29
    assert [start.source for start in sized if start.agrees is not True] == []


def test_sources_that_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match="none of its 1 files is a start-up log"):
        explain_sources([str(tmp_path)])
    with pytest.raises(ConfigError, match="No such file"):
        explain_sources([str(tmp_path / "no.log")])


# --------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such.log"],
        ["a.log", "b.log", "c.log"],
        ["http://127.0.0.1:9"],
        ["http://127.0.0.1:9", "a.log"],
        ["--model", "no-such-model", "a.log"],
    ],
)
def test_bad_input_ends_with_2_and_a_sentence(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdkv", "explain", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("pdkv: ")
    assert "Traceback" not in done.stderr


def test_a_log_from_a_pipe_as_json_without_torch() -> None:
    program = (
        "import sys; from pdkv.cli.main import app\n"
        "try: app(['explain', '-', '--json'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=samples.V1_0_9, capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    assert set(answer) == {"source", "observed", "recomputed", "agrees", "findings"}
    assert answer["observed"]["kv_cache_size_tokens"] == 178880
    assert {"id", "text", "severity", "bytes", "effect"} == set(answer["findings"][0])


def test_markup_in_a_log_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(samples.V1_0_9.replace("model='m'", "model='[red]x[/y]'"))
    done = subprocess.run(
        [sys.executable, "-m", "pdkv", "explain", str(path)], capture_output=True, text=True, check=True
    )
    assert "[red]x[/y]" in done.stdout


HOSTILE = (
    "0",
    "0.000000000",
    "-1",
    "-0.01",
    "1",
    "999999999",
    "999999999999999999",
    "0.5",
    "12.345678901",
    "16",
    "8192",
)


@pytest.mark.parametrize(
    "sample", ["V0_6_TOO_LONG", "V0_8_TP", "V1_0_32", "V1_0_32_CPU", "TOO_LONG", "SHARED", "SAMPLER"]
)
@pytest.mark.parametrize("spec", [None, gemma_12b()], ids=["unknown", "gemma"])
def test_numbers_that_make_no_sense_are_explained_or_refused(sample: str, spec: ModelSpec | None) -> None:
    """Any number of a log replaced by one that cannot be: no division by nothing, no endless search, no traceback."""
    draw = random.Random(7)
    pieces = re.split(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?![\w])", SAMPLES[sample])
    for _ in range(20):
        changed = [
            draw.choice(HOSTILE) if index % 2 and draw.random() < 0.25 else piece for index, piece in enumerate(pieces)
        ]
        try:
            answer = explained("".join(changed), spec)
        except ConfigError:
            continue
        json.dumps(answer.observed)


def test_two_starts_with_numbers_that_make_no_sense_are_compared() -> None:
    draw = random.Random(11)
    pieces = re.split(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?![\w])", SAMPLES["V1_0_32"])
    for _ in range(20):
        changed = "".join(
            draw.choice(HOSTILE) if index % 2 and draw.random() < 0.25 else piece for index, piece in enumerate(pieces)
        )
        try:
            starts = [
                read_start("log", read_startup_log(io.BytesIO(log.encode())), gemma_12b())
                for log in (SAMPLES["V1_0_32"], changed)
            ]
        except ConfigError:
            continue
        change = compare(*starts).difference
        if change.kv_bytes is not None:
            assert sum(cause.bytes or 0 for cause in change.memory) == change.kv_bytes
