"""pdkv: the decode-side KV-cache memory system of prefill/decode-disaggregated LLM serving."""

__version__ = "0.1.0"

__all__ = ["__version__"]
