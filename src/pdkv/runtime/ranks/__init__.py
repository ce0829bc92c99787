"""Tensor parallel: one model over several processes, the ranks of an instance (docs/tensor-parallel.md).

Rank 0 is the instance's own process, with engine, sampler and control thread. The others (`worker`) hold a shard of the
weights (`shard`) and a KV pool of their own, and follow what rank 0 sends (`messages`, `processes`).
"""
