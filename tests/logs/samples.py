"""Lines of start-ups of several releases, as public reports show them (numbers are theirs)."""

from __future__ import annotations

V0_6 = """\
INFO 10-07 22:54:54 llm_engine.py:226] Initializing an LLM engine (v0.6.2) with config: model='meta-llama/Llama-3.1-8B-Instruct', speculative_config=None, tokenizer='x', dtype=torch.bfloat16, max_seq_len=20000, tensor_parallel_size=1, pipeline_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto, device_config=cuda, enable_prefix_caching=False)
INFO 10-07 22:55:10 model_runner.py:1025] Loading model weights took 14.9888 GB
INFO 10-07 22:55:12 gpu_executor.py:122] # GPU blocks: 1952, # CPU blocks: 2048
INFO 10-07 22:55:12 gpu_executor.py:126] Maximum concurrency for 20000 tokens per request: 1.56x
"""

V0_6_TABLE = """\
INFO 12-13 19:55:20 llm_engine.py:234] Initializing an LLM engine (v0.6.5) with config: model='meta-llama/Meta-Llama-3-8B', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=2, kv_cache_dtype=auto)
INFO 12-13 19:55:25 worker.py:243] Memory profiling results:
INFO 12-13 19:55:25 worker.py:243] total_gpu_memory\t79.22GiB
INFO 12-13 19:55:25 worker.py:243] the current vLLM instance can use\t71.29GiB
INFO 12-13 19:55:25 worker.py:243] model weights take\t7.48GiB
INFO 12-13 19:55:25 worker.py:243] non_torch_memory\t3.58GiB
INFO 12-13 19:55:25 worker.py:243] PyTorch activation peak memory\t1.26GiB
INFO 12-13 19:55:25 worker.py:243] available_kv_cache_memory\t58.97GiB
"""

V0_8_TP = """\
INFO 04-12 08:21:00 [llm_engine.py:241] Initializing a V0 LLM engine (v0.8.3) with config: model='m', dtype=torch.float16, max_seq_len=4096, tensor_parallel_size=2, kv_cache_dtype=auto)
(VllmWorkerProcess pid=521) INFO 04-12 08:21:19 [worker.py:267] the current vLLM instance can use total_gpu_memory (23.58GiB) x gpu_memory_utilization (0.99) = 23.35GiB
(VllmWorkerProcess pid=521) INFO 04-12 08:21:19 [worker.py:267] model weights take 21.21GiB; non_torch_memory takes 0.20GiB; PyTorch activation peak memory takes 0.37GiB; the rest of the memory reserved for KV Cache is 1.57GiB.
INFO 04-12 08:21:19 [worker.py:267] the current vLLM instance can use total_gpu_memory (23.58GiB) x gpu_memory_utilization (0.99) = 23.35GiB
INFO 04-12 08:21:19 [worker.py:267] model weights take 21.21GiB; non_torch_memory takes 0.20GiB; PyTorch activation peak memory takes 0.57GiB; the rest of the memory reserved for KV Cache is 1.37GiB.
INFO 04-12 08:21:20 [executor_base.py:111] # cuda blocks: 7191, # CPU blocks: 512
INFO 04-12 08:21:20 [executor_base.py:116] Maximum concurrency for 4096 tokens per request: 28.09x
"""

V1_0_7 = """\
INFO 02-20 00:00:00 core.py:40] Initializing a V1 LLM engine (v0.7.3) with config: model='m', dtype=torch.bfloat16, max_seq_len=2048, tensor_parallel_size=1)
INFO 02-20 00:01:02 kv_cache_utils.py:522] # GPU blocks: 127626
INFO 02-20 00:01:02 kv_cache_utils.py:525] Maximum concurrency for 2048 tokens per request: 997.08x
"""

V1_0_9 = """\
INFO 06-01 00:00:00 [core.py:70] Initializing a V1 LLM engine (v0.9.1) with config: model='m', dtype=torch.bfloat16, max_seq_len=131072, tensor_parallel_size=2, kv_cache_dtype=fp8)
(VllmWorker rank=1 pid=201) INFO 06-01 00:00:50 [gpu_worker.py:227] Available KV cache memory: 12.54 GiB
(VllmWorker rank=0 pid=200) INFO 06-01 00:00:50 [gpu_worker.py:227] Available KV cache memory: 12.57 GiB
INFO 06-01 00:00:51 [kv_cache_utils.py:715] GPU KV cache size: 178,880 tokens
INFO 06-01 00:00:51 [kv_cache_utils.py:719] Maximum concurrency for 131,072 tokens per request: 1.36x
"""

V1_0_32 = """\
(EngineCore pid=9) INFO 06-01 00:00:00 [core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: model='m', dtype=torch.bfloat16, max_seq_len=262144, tensor_parallel_size=1, kv_cache_dtype=auto)
(EngineCore pid=9) DEBUG 06-01 00:00:40 [gpu_worker.py:747] Initial free memory: 78.68 GiB; Requested memory: 0.920000 (util), 72.85 GiB
(EngineCore pid=9) DEBUG 06-01 00:00:40 [gpu_worker.py:758] Memory profiling takes 3.10 seconds. Total non KV cache memory: 17.12GiB; torch peak memory increase: 1.89GiB; total consumed (from mem_get_info): 15.24GiB; weights memory: 14.99GiB.
(EngineCore pid=9) INFO 06-01 00:00:40 [gpu_worker.py:760] Available KV cache memory: 54.89 GiB
(EngineCore pid=9) INFO 06-01 00:00:40 [kv_cache_utils.py:853] kv cache group sizes (16, 16, 32)
(EngineCore pid=9) INFO 06-01 00:00:41 [kv_cache_utils.py:2328] GPU + host KV cache size: 449,645 tokens, Maximum concurrency for 262,144 tokens per request: 1.72x
(EngineCore pid=9) INFO 06-01 00:00:50 [gpu_worker.py:1030] Free memory on device (78.68/79.19 GiB) on startup. Desired GPU memory utilization is (0.92, 72.85 GiB). Actual usage is 15.24 GiB for consumed memory (weights + non-torch), 2.73 GiB for peak activation, and 0.91 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=57817825280` (53.85 GiB) to fit into requested memory, or `--kv-cache-memory=64077633536` (59.68 GiB) to fully utilize gpu memory. Current kv cache memory in use is 54.89 GiB.
"""

TOO_LONG = """\
(EngineCore_DP0 pid=7) INFO 10-01 00:00:00 [core.py:100] Initializing a V1 LLM engine (v0.11.0) with config: model='meta-llama/Llama-3.2-3B-Instruct', dtype=torch.bfloat16, max_seq_len=131072, tensor_parallel_size=1)
(EngineCore_DP0 pid=7) INFO 10-01 00:01:00 [gpu_worker.py:298] Available KV cache memory: 12.54 GiB
(EngineCore_DP0 pid=7) ERROR 10-01 00:01:00 [core.py:708] ValueError: To serve at least one request with the models's max seq len (131072), (14.00 GiB KV cache is needed, which is larger than the available KV cache memory (12.54 GiB). Based on the available memory, the estimated maximum model length is 117392. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""

# As vLLM 0.32.0 on a CPU printed them for a Llama of 4 layers with 2 KV heads of 64, VLLM_CPU_KVCACHE_SPACE=1.
V1_0_32_CPU = """\
(EngineCore pid=16946) INFO 11-29 21:02:44 [v1/engine/core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/tmp/p3vllm/m', speculative_config=None, tokenizer='/tmp/p3vllm/m', skip_tokenizer_init=True, tokenizer_mode=auto, revision=None, tokenizer_revision=None, trust_remote_code=False, dtype=torch.bfloat16, max_seq_len=2048, download_dir=None, load_format=dummy, tensor_parallel_size=1, pipeline_parallel_size=1)
(VllmWorker-0 pid=17103) DEBUG 11-29 21:03:19 [triton_utils/dispatcher.py:175] Registered kernel override vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel
(EngineCore pid=16946) INFO 11-29 21:03:27 [v1/attention/backends/utils.py:347] Using LBHNC KV cache layout.
(Worker pid=17103) INFO 11-29 21:03:27 [v1/worker/cpu_worker.py:260] Explicitly set (1.0/21.84) GiB for KV cache on node 0.
(EngineCore pid=16946) INFO 11-29 21:03:27 [v1/core/kv_cache_utils.py:2327] CPU KV cache size: 524,288 tokens, Maximum concurrency for 2,048 tokens per request: 256.00x
(EngineCore pid=16946) INFO 11-29 21:03:36 [v1/engine/core.py:402] init engine (profile, create kv cache, warmup model) took 8.81 s
"""

# vllm-project/vllm issue 10517: V0 without prefixes; 29,000 tokens did not fit.
V0_6_TOO_LONG = """\
Loading model weights took 14.9888 GB
Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.34GiB peak_torch_memory=17.98GiB memory_usage_post_profile=15.35GiB non_torch_memory=0.35GiB kv_cache_size=2.89GiB gpu_memory_utilization=0.90
# GPU blocks: 1478, # CPU blocks: 2048
Maximum concurrency for 29000 tokens per request: 0.82x
ValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV cache (23648). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
"""

# Wrapped by a pager, nothing left for KV.
V0_8_WRAPPED = """\
22:07:58  INFO [model_runner.py:1115] Model loading took 6.5935 GiB and 7.243515 seconds
22:12:16  INFO [worker.py:295] Memory profiling takes 257.11 seconds
22:12:16  INFO [worker.py:295] model weights take 6.59GiB; non_torch_memory takes 8.29GiB;
                               PyTorch activation peak memory takes 4.93GiB;
                               the rest of the memory reserved for KV Cache is -7.83GiB.
22:12:16  INFO [executor_base.py:118] Maximum concurrency for 4096 tokens per request: 0.00x
22:12:16.774710Z [error] vLLM model failed: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`
"""

# Ray names hosts before vLLM's own names, and may leave them out.
RAY = """\
(RayWorkerWrapper pid=689) INFO 04-08 03:49:35 [gpu_model_runner.py:1273] Model loading took 51.1453 GiB and 61.854495 seconds
(RayWorkerProc pid=77, ip=10.0.0.1) (Worker_DP0_TP0_EP0 pid=77) INFO 06-10 11:08:22 [gpu_model_runner.py:5187] Model loading took 12.01 GiB memory and 288.263749 seconds
(RayWorkerProc pid=77, ip=10.0.0.2) (Worker_DP1_TP0_EP1 pid=77) INFO 06-10 11:08:22 [gpu_model_runner.py:5187] Model loading took 12.02 GiB memory and 288.263749 seconds
(RayWorkerProc pid=77, ip=10.0.0.2) (Worker_DP1_TP0_EP1 pid=77) INFO 06-10 11:08:39 [gpu_worker.py:436] Available KV cache memory: 40.5 GiB
"""
