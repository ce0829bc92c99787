"""A pasted command -> options: every form that people paste, every flag of vLLM, and what is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.plan.command_text import read_command
from pdkv.plan.options import PlanOptions
from pdkv.plan.planner import make_plan
from pdkv.plan.vllm_args import ServeCommand, parse_command
from pdkv.plan.vllm_flags import find_flag, flags
from pdkv.plan.vllm_values import USED_FLAGS
from pdkv.source import find_spec

NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'


def changed(command: ServeCommand) -> dict[str, Any]:
    """The options that differ from vLLM's defaults."""
    default = PlanOptions()
    return {
        field.name: getattr(command.options, field.name)
        for field in fields(PlanOptions)
        if getattr(command.options, field.name) != getattr(default, field.name)
    }


WANTED = {"tensor_parallel_size": 2, "max_model_len": 16384}
FORMS = {
    "plain": "vllm serve a/b --tensor-parallel-size 2 --max-model-len 16384",
    "short, underscores, equals": "vllm serve a/b -tp 2 --max_model_len=16384",
    "--model and a unique beginning": "vllm serve --model a/b --tensor-parallel 2 --max-model-len 16K",
    "continuations, blanks behind one": "vllm serve a/b \\\n   --tensor-parallel-size 2 \\  \n --max-model-len 16384\n",
    "a continuation forgotten": "vllm serve a/b\n  --tensor-parallel-size 2\n  --max-model-len 16384",
    "carriage returns": "vllm serve a/b \\\r\n -tp 2 \\\r\n --max-model-len 16384\r\n",
    "comments": "# our decode node\nvllm serve a/b \\\n # big\n -tp 2 --max-model-len 16384  # that is all",
    "a prompt sign": "$ vllm serve a/b -tp 2 --max-model-len 16384",
    "redirections": "nohup vllm serve a/b --max-model-len 16384 -tp 2 > log 2>&1 &",
    "piped": "vllm serve a/b --max-model-len 16384 -tp 2 2>&1 | tee server.log",
    "after other commands": "export M=a/b; ulimit -n 65535 && vllm serve $M -tp 2 --max-model-len ${LEN:-16384}",
    "the module": "python3 -m vllm.entrypoints.openai.api_server --model a/b -tp 2 --max-model-len 16384",
    "module of the CLI": "python -m vllm.entrypoints.cli.main serve a/b -tp 2 --max-model-len 16384",
    "wrapped": "CUDA_VISIBLE_DEVICES=0,1 numactl -N 0 uv run vllm serve a/b -tp 2 --max-model-len 16384",
    "shell in a shell": "srun bash -lc 'vllm serve a/b -tp 2 --max-model-len 16384'",
    "docker": "docker run --rm --gpus all -e HF_TOKEN=x -v ~/.cache:/root/.cache -p 8000:8000 --ipc=host "
    "vllm/vllm-openai:latest --model a/b -tp 2 --max-model-len 16384",
    "docker with an entrypoint": "podman run --entrypoint /bin/bash -it img/vllm "
    "-c 'vllm serve a/b -tp 2 --max-model-len 16384'",
    "only the options": "--model a/b --tensor-parallel-size 2 --max-model-len 16384",
    "long dashes": "vllm serve a/b –tensor-parallel-size 2 —max-model-len 16384",
    "a YAML list": '- --model\n- a/b\n- "--tensor-parallel-size=2"\n- --max-model-len 16384\n',
    "a JSON list": '["vllm", "serve", "a/b", "-tp", "2", "--max-model-len", "16384"]',
    "compose": "services:\n  d:\n    image: vllm/vllm-openai:latest\n    environment:\n      - LEN=16384\n"
    "    command: --model a/b -tp 2 --max-model-len ${LEN}\n",
    "a pod": """
apiVersion: v1
kind: Pod
spec:
  initContainers:
  - name: wait
    image: busybox
    command: [sh, -c, sleep 1]
  containers:
  - name: d
    image: vllm/vllm-openai:latest
    command: ["vllm", "serve"]
    args: ["$(MODEL)", "--tensor-parallel-size", 2, "--max-model-len=16384"]
    env:
    - {name: MODEL, value: a/b}
    - {name: TOKEN, valueFrom: {secretKeyRef: {name: t, key: k}}}
""",
    "a script in a pod": "args:\n- |\n  set -e\n  vllm serve a/b \\\n    -tp 2 \\\n    --max-model-len 16384\n"
    "command: [/bin/sh, -c]\n",
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_every_form_says_the_same(text: str) -> None:
    command = parse_command(text)
    assert command.model == "a/b"
    assert changed(command) == WANTED


def test_values_are_read_as_vllm_reads_them() -> None:
    command = parse_command(
        "VLLM_KV_CACHE_LAYOUT=HND VLLM_ATTENTION_BACKEND=FLASHINFER_VLLM_V1 VLLM_USE_V2_MODEL_RUNNER=0 HF_HOME=/x "
        "vllm serve a/b --max-model-len -1 --max-num-batched-tokens 25.6k --kv-cache-memory-bytes 20G --block-size 32 "
        "--gpu-memory-utilization 0.9 --no-enable-prefix-caching --no-async-scheduling --dtype half --enforce-eager "
        "--kv-cache-dtype-skip-layers 0 1 sliding_window --cudagraph-capture-sizes 1 2 4 --performance-mode throughput "
        "--disable-hybrid-kv-cache-manager --kv-offloading-size 64 -O0 -dp 4 -dcp 2 -pp 3 -ep"
    )
    assert changed(command) == {
        "kv_cache_layout": "HND",
        "attention_backend": "FLASHINFER",
        "v1_runner": True,
        "max_model_len": "auto",
        "max_num_batched_tokens": 25_600,
        "kv_cache_memory_bytes": 20 << 30,
        "block_size": 32,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "dtype": "float16",
        "enforce_eager": True,
        "kv_cache_dtype_skip_layers": ("0", "1", "sliding_window"),
        "cudagraph_capture_sizes": (1, 2, 4),
        "throughput_mode": True,
        "disable_hybrid_kv_cache_manager": True,
        "kv_offloading_bytes": 64 << 30,
        "cudagraph_mode": "NONE",
        "data_parallel_size": 4,
        "decode_context_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "enable_expert_parallel": True,
    }
    assert "HF_HOME" in command.irrelevant
    assert command.warnings == ()


def test_a_command_for_a_cpu() -> None:
    """As a real vLLM 0.32 on a CPU sized it: 182 blocks of 128 tokens, seen by `pdkv verify`."""
    command = parse_command("VLLM_CPU_KVCACHE_SPACE=1 vllm serve smollm2 --dtype float32 --max-model-len 4096")
    assert changed(command) == {
        "kv_cache_memory_bytes": 1 << 30,
        "attention_backend": "CPU_ATTN",
        "async_scheduling": False,
        "dtype": "float32",
        "max_model_len": 4096,
    }
    report = make_plan(find_spec("smollm2"), command.options)
    assert (report.capacity.num_blocks, report.kv.block_size, report.capacity.kv_cache_size_tokens) == (
        182,
        128,
        23_296,
    )


def test_json_flags_whole_and_by_parts() -> None:
    whole = parse_command(
        f"vllm serve a/b --kv-transfer-config '{NIXL}' "
        """--speculative-config '{"method":"mtp","num_speculative_tokens":2}' """
        """--hf-overrides '{"rope_parameters":{"factor":4.0},"text_config":{"sliding_window":512}}' """
        """--attention-config '{"backend":"FLASHINFER"}' --compilation-config '{"cudagraph_mode":"FULL"}'"""
    )
    parts = parse_command(
        "vllm serve a/b --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role=kv_consumer "
        "-sc.method mtp --speculative_config.num_speculative_tokens 2 --hf-overrides.rope_parameters.factor 4.0 "
        "--hf_overrides.text_config.sliding_window=512 -ac.backend FLASHINFER -cc.cudagraph_mode=FULL"
    )
    assert whole.options == parts.options
    assert whole.overrides == parts.overrides == {
        "rope_parameters": {"factor": 4.0},
        "text_config": {"sliding_window": 512},
    }  # fmt: skip
    assert whole.options.kv_transfer is not None
    assert (whole.options.kv_transfer.connector, whole.options.kv_transfer.role) == ("NixlConnector", "kv_consumer")
    assert (whole.options.speculative_method, whole.options.speculative_tokens) == ("mtp", 2)
    assert (whole.options.attention_backend, whole.options.cudagraph_mode) == ("FLASHINFER", "FULL")


def test_what_may_matter_is_named() -> None:
    command = parse_command(
        "VLLM_FANCY=1 vllm serve a/b --enable-lora --no-enable-dbo --cpu-offload-gb 4 --swap-space 4 --zork 5 "
        '--kv-transfer-config \'{"kv_connector":"Mine","kv_role":"kv_both"}\' --additional-config \'{}\''
    )
    text = "\n".join(command.warnings)
    for name in ("VLLM_FANCY=1", "--enable-lora", "--cpu-offload-gb", "--swap-space", "--zork", "--additional"):
        assert name in text
    assert "--enable-dbo" not in text


def test_the_image_names_the_release() -> None:
    assert parse_command("docker run vllm/vllm-openai:v0.11.2 --model a/b").options.vllm_version == "0.11"
    latest = parse_command("docker run vllm/vllm-openai:nightly --model a/b")
    assert latest.options.vllm_version == PlanOptions().vllm_version
    assert any("nightly" in warning for warning in latest.warnings)


def test_a_config_file(tmp_path: Any) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: a/b\ntensor-parallel-size: 8\nmax-model-len: 16384\nenforce-eager: true\nport: 1\n")
    command = parse_command(f"vllm serve --config {path} -tp 2")
    assert command.model == "a/b"
    assert changed(command) == {**WANTED, "enforce_eager": True}
    missing = parse_command("vllm serve a/b --config elsewhere.yaml")
    assert any("elsewhere.yaml is not here" in warning for warning in missing.warnings)


def test_of_a_pair_the_decode_instance_is_planned() -> None:
    pair = "\n".join(
        f"CUDA_VISIBLE_DEVICES={index} vllm serve a/b -tp {size} --kv-transfer-config "
        f'\'{{"kv_connector":"NixlConnector","kv_role":"{role}"}}\' &'
        for index, (size, role) in enumerate(((1, "kv_producer"), (2, "kv_consumer")))
    )
    assert parse_command(pair).options.tensor_parallel_size == 2
    with pytest.raises(ConfigError, match="2 vLLM servers"):
        parse_command(pair.replace("kv_consumer", "kv_producer"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the text is empty"),
        ("make coffee", "no vLLM server is started"),
        ("python -m sglang.launch_server --model-path a/b", "sglang, not vLLM"),
        ("vllm serve 'a/b", "No closing quotation"),
        ("docker run --gpus all", "names no image"),
        ("vllm serve a/b --tensor-parallel-size", "--tensor-parallel-size needs a value"),
        ("vllm serve a/b -tp two", "--tensor-parallel-size 'two'"),
        ("vllm serve a/b -tp 0", "--tensor-parallel-size 0"),
        ("vllm serve a/b --kv-cache-memory-bytes -5", "--kv-cache-memory-bytes '-5'"),
        ("vllm serve a/b --max-model-len 1.5K", "--max-model-len '1.5K'"),
        ("vllm serve a/b --gpu-memory-utilization 1.2", "--gpu-memory-utilization 1.2"),
        ("vllm serve a/b --gpu-memory-utilization nan", "not a number"),
        ("vllm serve a/b --watermark 2", "--watermark 2.0"),
        ("vllm serve a/b --kv-transfer-config {kv_connector:NixlConnector}", "--kv-transfer-config is not valid JSON"),
        ("vllm serve a/b --kv-transfer-config '{}'", "names no kv_connector"),
        ('vllm serve a/b --kv-transfer-config \'{"kv_connector":"NixlConnector"}\'', "kv_role is None"),
        ("vllm serve a/b --hf-overrides '[1]'", "must be a JSON object"),
        ('vllm serve a/b --speculative-config \'{"num_speculative_tokens":"x"}\'', "num_speculative_tokens"),
        ("vllm serve $MODEL", "MODEL is a variable that the text does not set"),
        ("args: [\n- x: }", "not valid"),
        ("x" * (1 << 20) + "yz", "are no command"),
    ],
)
def test_refusals(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_command(text)


PIECES = ["vllm", "serve", "docker", "run", "-c", "bash", "--model", "a/b", "-tp", "2", "--no-enable-lora"]
PIECES += ["'", '"', "\\", "{", "}", "[", "]", "-", ":", "args:", "{}", "=", "-O", "--", "$X", "&&", ">"]
PIECES += ["--hf-overrides.a.b", "\n", "\\\n", "- "]


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=200),
        st.lists(
            st.sampled_from(PIECES),
            max_size=14,
        ).map(" ".join),
    )
)
def test_no_text_breaks_it(text: str) -> None:
    try:
        parse_command(text)
    except ConfigError as error:
        assert str(error)


def test_deeply_nested_text_is_refused() -> None:
    with pytest.raises(ConfigError):
        parse_command("[" * 100_000)
    lots = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(8)
    )
    with pytest.raises(ConfigError, match="manifest is too large"):
        parse_command(lots)


# -------------------------------------------------------------------------------------------------------------- flags


def test_every_flag_is_used_or_harmless_or_named() -> None:
    """The table says a role for each; here that the reader follows it."""
    for name, flag in {flag.name: flag for flag in flags().values()}.items():
        assert flag.role in ("use", "skip", "warn")
        assert bool(flag.why) == (flag.role == "warn"), name
        if flag.role == "use":
            continue
        value = [] if flag.values == "0" else ["1"]
        command = parse_command(shlex.join(["vllm", "serve", "a/b", name, *value]))
        assert changed(command) == {}, name
        assert (name in command.irrelevant) == (flag.role == "skip"), name
        assert any(warning.startswith(name) for warning in command.warnings) == (flag.role == "warn"), name
    assert {flag.name for flag in flags().values() if flag.role == "use"} == USED_FLAGS


SAMPLES = {
    "--dtype": "float16", "--max-model-len": "77", "--quantization": "fp8", "--hf-overrides": '{"a":1}',
    "--attention-backend": "FLASHINFER", "--attention-config": '{"backend":"FLASHINFER"}', "--kv-cache-dtype": "fp8",
    "--gpu-memory-utilization": "0.5", "--kv-cache-dtype-skip-layers": "3", "--mamba-cache-dtype": "float32",
    "--mamba-ssm-cache-dtype": "float32", "--mamba-cache-mode": "none", "--watermark": "0.1", "--spec-method": "mtp",
    "--speculative-config": '{"method":"mtp"}', "--spec-model": "x/y", "--kv-transfer-config": NIXL,
    "--compilation-config": '{"cudagraph_mode":"FULL"}', "--performance-mode": "throughput",
    "--optimization-level": "0",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(USED_FLAGS - {"--model", "--config"}))
def test_a_used_flag_changes_the_plan(name: str) -> None:
    flag = flags()[name]
    spelling = name
    words = [] if flag.values == "0" else [SAMPLES.get(name, "7")]
    if flag.values == "0" and name in ("--enable-prefix-caching", "--enable-chunked-prefill", "--async-scheduling"):
        spelling = name.replace("--", "--no-", 1)
    command = parse_command(shlex.join(["vllm", "serve", "a/b", spelling, *words]))
    assert command.options != PlanOptions() or command.overrides
    assert name in command.used
    assert command.warnings == ()


def test_spellings() -> None:
    assert find_flag("-tp") == (flags()["--tensor-parallel-size"], "-tp")
    found = find_flag("--no_enable_prefix_caching")
    assert found is not None
    assert (found[0].name, found[1]) == ("--enable-prefix-caching", "--no-enable-prefix-caching")
    assert find_flag("--max") is None  # of several
    assert find_flag("--zork") is None
    assert len({flag.name for flag in flags().values() if not flag.removed}) == 316


def test_json_lists_hold_words_as_they_are() -> None:
    words = ["vllm", "serve", "a/b", "--kv-transfer-config", NIXL]
    assert read_command(json.dumps(words)).arguments == tuple(words[2:])
