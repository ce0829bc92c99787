"""Lengths beyond what a model was made for: a plan answers, and says that vLLM would not start by itself."""

from __future__ import annotations

from pdkv.models.spec import ModelSpec
from pdkv.plan.options import PlanOptions

BEYOND_MODEL_LENGTH = "beyond-model-length"
"""The id that the warning begins with, as ``id: text``."""
ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""vLLM's variable: with 1 it only warns (config/model.py, _get_and_verify_max_len)."""


def beyond_model_length(spec: ModelSpec, num_tokens: int) -> tuple[str, ...]:
    """The warning for requests of ``num_tokens`` tokens; empty for a length that ``spec`` was made for.

    ``spec.max_model_len`` has rope scaling in it, also that of --hf-overrides.
    """
    own = spec.max_model_len
    if num_tokens <= own:
        return ()
    return (
        f"{BEYOND_MODEL_LENGTH}: {spec.name} was made for {own:,} tokens (its config.json), and {num_tokens:,} were "
        f"asked for. vLLM refuses to start with --max-model-len {num_tokens} unless {ALLOW_LONG}=1 is set, and then "
        f"answers past {own:,} tokens are not to be trusted (nan, or an illegal memory access). The memory is right "
        "all the same; rope scaling in --hf-overrides raises the model's own length",
    )


def needs_allow_long(spec: ModelSpec, options: PlanOptions) -> bool:
    """Whether vLLM starts with these options only when ALLOW_LONG is set."""
    return bool(beyond_model_length(spec, options.length(spec)))


def is_beyond_model_length(warning: str) -> bool:
    """Whether ``warning`` is this one, which is shown before all others."""
    return warning.startswith(BEYOND_MODEL_LENGTH)
