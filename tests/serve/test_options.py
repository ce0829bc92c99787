from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.serve.options import InstanceOptions, RouterOptions, ServeOptions


def instance(**changes: Any) -> InstanceOptions:
    return InstanceOptions(**{"role": "decode", "model": "smollm2", **changes})


def test_defaults_are_valid() -> None:
    options = instance()
    assert options.host == "127.0.0.1"
    assert options.kv_load_failure_policy is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"role": "both"}, "role"),
        ({"model": " "}, "MODEL"),
        ({"host": "http://x"}, "--host"),
        ({"port": 70000}, "--port"),
        ({"device": "tpu"}, "--device"),
        ({"dtype": "int4"}, "--dtype"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"block_size": 24}, "--block-size"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"kv_cache_memory_bytes": 10}, "--kv-cache-memory-bytes"),
        ({"num_gpu_blocks_override": 1}, "--num-gpu-blocks-override"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        ({"prefix_caching_hash_algo": "md5"}, "--prefix-caching-hash-algo"),
        ({"watermark": 1.0}, "--watermark"),
        ({"transport": "rdma"}, "--transport"),
        ({"policy": "best"}, "--policy"),
        ({"kv_load_failure_policy": "hope"}, "--kv-load-failure-policy"),
        ({"kv_load_timeout_s": 0}, "--kv-load-timeout"),
        ({"push_registration_timeout_s": 0}, "--push-registration-timeout"),
        ({"kv_lease_duration_s": 5}, "--kv-lease-duration"),
        ({"max_leased_fraction": 0.0}, "--max-leased-fraction"),
        ({"threads": 0}, "--threads"),
        ({"weight_storage": "int4"}, "--weight-storage"),
        ({"side_channel_host": "tcp://x"}, "--side-channel-host"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size 0: from 1 to 64 ranks"),
        ({"host": "0.0.0.0"}, "--side-channel-host 10"),
        ({"host": "::"}, "--side-channel-host 10"),
        ({"side_channel_host": "0.0.0.0"}, "--side-channel-host 0.0.0.0"),
    ],
)
def test_bad_values_name_the_option(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        instance(**changes)


def test_a_wildcard_needs_an_address_to_tell_the_peers() -> None:
    guarded = {"transfer_secret_file": "secret"}
    assert instance(host="0.0.0.0", side_channel_host="10.0.0.5", **guarded).side_channel_host == "10.0.0.5"
    assert instance(host="p.example", **guarded).side_channel_host is None


@pytest.mark.parametrize(
    "beyond",
    [{"host": "10.0.0.5"}, {"host": "p.example"}, {"side_channel_host": "10.0.0.5"}, {"side_channel_host": "fd00::5"}],
)
def test_beyond_loopback_peers_must_prove_a_secret(beyond: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"beyond loopback.*--transfer-secret-file FILE"):
        instance(**beyond)
    assert instance(**beyond, transfer_secret_file="f").transfer_secret_file == "f"
    with pytest.raises(ConfigError, match="--transfer-secret-file is empty"):
        instance(**beyond, transfer_secret_file=" ")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_on_loopback_nothing_needs_a_secret_and_http_may_listen_anywhere(host: str) -> None:
    assert instance(host=host).transfer_secret_file is None
    assert instance(host="0.0.0.0", side_channel_host=host).host == "0.0.0.0"


@pytest.mark.parametrize("url", ["127.0.0.1:8100", "ftp://x", "http://", "http://h:99999", "http://h/?a=1"])
def test_router_refuses_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="--prefill"):
        RouterOptions(prefill=(url,), decode=("http://127.0.0.1:1",))


def test_router_needs_both_sides_each_once_and_trims_slashes() -> None:
    with pytest.raises(ConfigError, match="--decode"):
        RouterOptions(prefill=("http://a:1",), decode=())
    with pytest.raises(ConfigError, match="--decode http://b:2: given more than once"):
        RouterOptions(prefill=("http://a:1",), decode=("http://b:2", "http://c:3", "http://b:2/"))
    assert RouterOptions(prefill=("http://a:1/",), decode=("http://b:2",)).prefill == ("http://a:1",)


def test_the_time_without_a_sign_of_life_is_positive() -> None:
    with pytest.raises(ConfigError, match="--instance-timeout 0"):
        RouterOptions(prefill=("http://a:1",), decode=("http://b:2",), instance_timeout_s=0)


def test_serve_wants_one_of_each_role() -> None:
    with pytest.raises(ConfigError, match="prefill"):
        ServeOptions(prefill=instance(), decode=instance())


def test_options_need_no_torch() -> None:
    code = "import sys, pdkv.serve.options; print(sorted({'torch','fastapi','transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
