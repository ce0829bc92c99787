"""The command line as a person meets it: real processes, what they print, their exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from pdkv.cli.main import app, run
from pdkv.errors import ConfigError
from pdkv.serve.options import InstanceOptions, RouterOptions, ServeOptions


def pdkv(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdkv", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_plan_prints_the_verdict_first() -> None:
    done = pdkv("plan", "smollm2", "--kv-cache-memory-bytes", "2GiB")
    assert done.returncode == 0
    assert done.stdout.startswith("fits: 93,200 tokens of KV cache, 11.38 requests of 8,192 tokens at once")
    assert done.stderr == ""


def test_plan_json_is_one_object_on_stdout() -> None:
    done = pdkv("plan", "smollm2", "--kv-cache-memory-bytes", "100MiB", "--max-model-len", "auto", "--json")
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert {"model", "kv", "memory", "capacity", "ranks", "deployment", "rules", "advice", "warnings"} <= set(answer)
    assert answer["capacity"]["max_model_len"] == 4528
    assert answer["capacity"]["fits"] is True


def test_plan_of_a_pasted_command() -> None:
    text = "vllm serve smollm2 -tp 3 --kv-cache-memory-bytes 1G --max-model-len 4K --port 1 --enable-lora"
    pasted = pdkv("plan", "--command", text, "--max-model-len", "2048", "--json")
    written = pdkv(
        "plan", "smollm2", "-tp", "3", "--kv-cache-memory-bytes", "1GiB", "--max-model-len", "2048", "--json"
    )
    first, second = json.loads(pasted.stdout), json.loads(written.stdout)
    assert [warning.split(":")[0] for warning in first["warnings"]] == ["--enable-lora"]
    assert first | {"warnings": []} == second
    piped = subprocess.run(
        [sys.executable, "-m", "pdkv", "plan", "--command", "-"], input=text, capture_output=True, text=True, check=True
    )
    assert "no effect on KV memory: --port" in piped.stdout


def test_any_flag_of_vllm_is_taken() -> None:
    flags = ["--enforce-eager", "--speculative-config", '{"method":"ngram","num_speculative_tokens":2}', "--port", "1"]
    done = pdkv("plan", *flags, "smollm2", "--kv-cache-memory-bytes", "1G", "--emit")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct \\",
        "  --kv-cache-memory-bytes 1073741824 \\",
        "  --enforce-eager \\",
        '  --speculative-config \'{"method":"ngram","num_speculative_tokens":2}\'',
    ]
    again = pdkv("plan", "--command", done.stdout, "--emit")
    assert again.stdout == done.stdout


def test_other_answers(tmp_path: Path) -> None:
    model = ["plan", "smollm2", "--kv-cache-memory-bytes", "100MiB"]
    table = json.loads(pdkv(*model, "--compare", "kv_cache_dtype=auto:fp8,tensor_parallel_size=1:2", "--json").stdout)
    assert [cell["refused"] is None for cell in table["cells"]] == [True, False, True, False]
    solved = json.loads(pdkv(*model, "--target-concurrency", "7", "--at-tokens", "1000", "--json").stdout)
    assert solved["best"]["gpus"] == 1
    assert solved["best"]["kv_cache_dtype"] == "fp8"
    written = pdkv(*model, "--report", str(tmp_path / "new" / "folder"))
    assert written.stdout.strip() == str(tmp_path / "new" / "folder" / "plan.html")
    assert "<svg" in (tmp_path / "new" / "folder" / "plan.html").read_text()
    decode = pdkv(*model, "--role", "decode", "--emit")
    assert decode.stdout.endswith(
        """--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'\n"""
    )
    assert "vLLM will not start like this" in decode.stderr


def test_what_does_not_fit_is_an_answer() -> None:
    done = pdkv("plan", "smollm2", "--kv-cache-memory-bytes", "100MiB")
    assert done.returncode == 0
    assert done.stdout.startswith("does not fit: one request of 8,192 tokens needs 512 blocks, 283 are usable")
    assert "max-model-len: set --max-model-len 4528, or auto" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "smollm2"], "Give --gpu"),
        (["plan", "no-such-model", "--kv-cache-memory-bytes", "1G"], "no-such-model: not a name in the catalogue"),
        (["plan", "smollm2", "--kv-cache-memory-bytes", "lots"], "--kv-cache-memory-bytes 'lots': not a number"),
        (["plan", "smollm2", "--kv-cache-memory-bytes", "1G", "--kv-cache-dtype", "fp7"], "there is no such type"),
        (["serve", "smollm2", "--block-size", "3"], "--block-size 3"),
        (["serve", "decode", "smollm2", "--max-model-len", "long"], "--max-model-len 'long'"),
        (["serve", "decode", "smollm2", "--max-model-len", "-5"], "for example 4096, 8k or auto"),
        (["serve", "router", "--prefill", "ftp://x", "--decode", "http://127.0.0.1:1"], "--prefill ftp://x"),
    ],
)
def test_refusals_exit_2_with_one_line_and_no_traceback(arguments: list[str], says: str) -> None:
    done = pdkv(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("pdkv: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


SMALL = ("plan", "smollm2", "--kv-cache-memory-bytes", "1G")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan"], "which model? Give MODEL"),
        (
            ["plan", "smollm2", "--no-such-option"],
            "--no-such-option: neither an option of pdkv plan",
        ),
        (["plan", "smollm2", "llama"], "llama: neither an option of pdkv plan"),
        (["plan", "smollm2", "--gpu", "h1000"], "--gpu h1000: no such device"),
        (["plan", "smollm2", "--gpu", "h100", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization 1.5"),
        ([*SMALL, "--watermark", "3"], "--watermark 3.0"),
        ([*SMALL, "--role", "judge"], "--role judge: there are decode"),
        ([*SMALL, "--request-rate", "2"], "--prompt-tokens and --output"),
        ([*SMALL, "--compare", "mood"], "--compare mood: there are"),
        ([*SMALL, "--target-concurrency", "9"], "belong together"),
        ([*SMALL, "--max-gpus", "0"], "belong together"),
        (
            [*SMALL, "--report", "/dev/null/x"],
            "--report /dev/null/x: cannot write",
        ),
        (["verify", "ftp://x", "--plan", "pyproject.toml"], "pyproject.toml is not a plan"),
        (["plan", "--command", "vllm serve --port 1"], "the text of --command names none"),
        (["plan", "--command", "vllm serve smollm2 -tp"], "--tensor-parallel-size needs a value"),
        ([*SMALL, "-tp", "2"], "9 attention heads"),
        ([*SMALL, "--attention-backend", "FLASHMLA"], "FLASHMLA"),
        (["plan", "smollm2", "--kv-cache-memory-bytes", "-1"], "--kv-cache-memory-bytes '-1'"),
        (["plan", "smollm2", "--kv-transfer-config", "{"], "--kv-transfer-config is not valid JSON"),
    ],
)
def test_refusals_of_plan_and_verify(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    """As above, without a process for each."""
    monkeypatch.setattr(sys, "argv", ["pdkv", *arguments])
    with pytest.raises(SystemExit) as end:
        run()
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("pdkv: ")
    assert says in printed.err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_traceback(closed: str) -> None:
    code = "import sys, pdkv.cli.main as m; sys.argv[1:] = ['explain', '-']; m.run()"
    done = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -c "$0" {closed}', code],
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("pdkv: standard input holds no line") or "2>&-" in closed


def test_a_full_disk_is_no_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pdkv", "models", "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "pdkv: cannot write: No space left on device\n")


def test_usage_errors_exit_2() -> None:
    assert pdkv("fly").returncode == 2


@pytest.mark.parametrize("command", [["--help"], ["plan", "--help"], ["serve", "--help"], ["serve", "prefill", "-h"]])
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    script = (
        "import sys\n"
        f"sys.argv = ['pdkv', *{command!r}]\n"
        "from pdkv.cli.main import run\n"
        "try:\n    run()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'zmq', 'nixl_cu12', 'numba', 'pdkv.runtime', 'pdkv.serve'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_plan_runs_without_the_engine_installed(tmp_path: Path) -> None:
    """As after a plain `pip install pdkv`: importing any of the engine's packages fails."""
    for name in ("torch", "transformers", "fastapi", "zmq", "psutil", "httpx", "numba"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.argv = ['pdkv', 'plan', 'smollm2', '--kv-cache-memory-bytes', '1G', '--json']\n"
        "import pdkv\nfrom pdkv.cli.main import run\nrun()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["capacity"]["fits"] is True


def test_serve_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class NoUvicorn:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'uvicorn':\n"
        "            raise ModuleNotFoundError('No module named uvicorn', name='uvicorn')\n"
        "sys.meta_path.insert(0, NoUvicorn())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pdkv", "serve", "prefill", "smollm2"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("pdkv: serving needs the package uvicorn")
    assert "pdkv[serve]" in done.stderr


# ---------------------------------------------------------------------------------------- what `serve` hands over


def start(monkeypatch: pytest.MonkeyPatch, module: str, *arguments: str) -> Any:
    """The options that ``pdkv serve ARGUMENTS`` gives to ``pdkv.serve.MODULE.run``, put in place of the real one."""
    given: list[Any] = []
    stand_in = ModuleType(f"pdkv.serve.{module}")
    stand_in.run = lambda options: given.append(options) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"pdkv.serve.{module}", stand_in)
    result = CliRunner().invoke(app, ["serve", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return given[0]


def test_serve_model_builds_one_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    options = start(
        monkeypatch, "supervisor", "--port", "9000", "smollm2",
        "--max-model-len", "auto", "--kv-cache-memory-bytes", "1GiB",
        "--no-enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor", "--side-channel-port", "5600",
    )  # fmt: skip
    assert isinstance(options, ServeOptions)
    assert (options.host, options.port, options.prefill_fallback) == ("127.0.0.1", 9000, "local")
    for instance, role, side_channel in ((options.prefill, "prefill", 5600), (options.decode, "decode", 5601)):
        assert (instance.role, instance.model, instance.side_channel_port) == (role, "smollm2", side_channel)
        assert (instance.max_model_len, instance.kv_cache_memory_bytes) == ("auto", 1 << 30)
        assert not instance.enable_prefix_caching
        assert instance.prefix_caching_hash_algo == "sha256_cbor"


def test_ranks_of_both_and_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(*arguments: str) -> tuple[int, int]:
        options = start(monkeypatch, "supervisor", "smollm2", *arguments)
        return options.prefill.tensor_parallel_size, options.decode.tensor_parallel_size

    assert ranks() == (1, 1)
    assert ranks("-tp", "3") == (3, 3)
    assert ranks("--tensor-parallel-size", "2", "--decode-tensor-parallel-size", "4") == (2, 4)
    assert ranks("--prefill-tensor-parallel-size", "2") == (2, 1)


def test_ctrl_c_is_a_request_to_stop_from_the_first_moment_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_options: Any) -> int:
        raise KeyboardInterrupt

    stand_in = ModuleType("pdkv.serve.instance_main")
    stand_in.run = interrupted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pdkv.serve.instance_main", stand_in)
    result = CliRunner().invoke(app, ["serve", "prefill", "smollm2"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "stopping" in result.output


def test_serve_defaults_are_those_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options = start(monkeypatch, "supervisor", "smollm2")
    expected = ServeOptions(
        prefill=InstanceOptions(role="prefill", model="smollm2"), decode=InstanceOptions(role="decode", model="smollm2")
    )
    assert options == expected


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_serve_one_instance(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    options = start(
        monkeypatch, "instance_main", role, "some/dir", "--port", "7",
        "--kv-load-timeout", "5", "--kv-lease-duration", "12", "--push-registration-timeout", "9",
        "--transport", "shm", "--policy", "vllm", "--debug", "--threads", "1", "--served-model-name", "me",
        "--host", "0.0.0.0", "--side-channel-host", "10.0.0.5", "--weight-storage", "bf16",
        "--transfer-secret-file", "a/secret",
    )  # fmt: skip
    assert isinstance(options, InstanceOptions)
    assert (options.role, options.model, options.port, options.transport) == (role, "some/dir", 7, "shm")
    assert (options.kv_load_timeout_s, options.kv_lease_duration_s, options.policy) == (5.0, 12, "vllm")
    assert options.push_registration_timeout_s == 9.0
    assert (options.debug, options.threads, options.served_model_name) == (True, 1, "me")
    assert (options.host, options.side_channel_host, options.weight_storage) == ("0.0.0.0", "10.0.0.5", "bf16")
    assert options.transfer_secret_file == "a/secret"


def test_serve_router(monkeypatch: pytest.MonkeyPatch) -> None:
    options = start(
        monkeypatch, "router", "router", "--prefill", "http://127.0.0.1:8100/", "--decode", "http://127.0.0.1:8200",
        "--decode", "http://127.0.0.1:8201", "--prefill-fallback", "fail", "--instance-timeout", "7",
        "--transfer-mode", "push",
    )  # fmt: skip
    assert isinstance(options, RouterOptions)
    assert options.transfer_mode == "push"
    assert options.prefill == ("http://127.0.0.1:8100",)
    assert len(options.decode) == 2
    assert options.prefill_fallback == "fail"


def test_a_wrong_choice_is_refused_by_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--transfer-mode sideways"):
        start(monkeypatch, "supervisor", "smollm2", "--transfer-mode", "sideways")
    with pytest.raises(ConfigError, match="--policy wild"):
        start(monkeypatch, "supervisor", "smollm2", "--policy", "wild")


def test_faults_plays_worlds_and_finds_nothing() -> None:
    done = pdkv("faults", "--seeds", "0:2", "--requests", "20", "--jobs", "1", "--json")
    assert done.returncode == 0, done.stdout
    answer = json.loads(done.stdout)
    assert (answer["worlds"], answer["requests"], answer["violations"]) == (2, 40, [])
    assert sum(answer["counts"][name] for name in ("COMPLETED", "ERROR", "LEFT") if name in answer["counts"]) == 40


def test_ctrl_c_ends_faults_and_its_workers() -> None:
    command = [sys.executable, "-m", "pdkv", "faults", "--seeds", "0:10000", "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as faults:
        try:
            until(lambda: len(playing(faults.pid)) == 2)
            workers = playing(faults.pid)
            os.killpg(faults.pid, signal.SIGINT)
            assert faults.wait(10) == 130
            until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
        finally:
            if faults.returncode is None:
                os.killpg(faults.pid, signal.SIGKILL)


def playing(parent: int) -> list[str]:
    """Processes of ``parent`` that are at work: they have computed for longer than starting takes."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    stats = {child: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in children}
    return [child for child in children if int(stats[child][11]) > 60]


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_faults_says_how_to_see_a_violation_again() -> None:
    for seed in range(20):
        done = pdkv("faults", "--policy", "vllm", "--seed", str(seed), "--requests", "40", "--trace")
        if done.returncode == 1:
            break
    last = done.stdout.splitlines()[-2:]
    assert last == [f"    pdkv faults --policy vllm --requests 40 --seed {seed} --trace", "1 violations"]
    assert "LeaseGranted" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "9:3"], "FIRST:END"),
        (["--seeds", "all"], "FIRST:END"),
        (["--policy", "none"], "strict, vllm"),
        (["--seed", "1", "--seeds", "0:2"], "one world or many"),
        (["--trace"], "--seed N"),
    ],
)
def test_faults_refuses(arguments: list[str], words: str) -> None:
    done = pdkv("faults", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
