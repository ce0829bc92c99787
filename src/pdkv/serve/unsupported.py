"""Fields of the APIs that would change the answer and are not served: refused by name, never dropped silently.

They are those of vLLM 0.32's request models and of OpenAI's that a client may count on, and vLLM's older guided_….
Fields that change nothing here are not among them: they concern what is refused or absent anyway (length_penalty of
a beam search, parallel_tool_calls, media options), or only how or to whom something is delivered (stream_interval,
session_id, user).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdkv.serve.openai import ApiError


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One field. ``harmless`` are the values, beside null, that ask for nothing; ``advice`` says what to do instead."""

    harmless: tuple[Any, ...] = ()
    advice: str = "not supported; leave it out"


_UNSUPPORTED = Unsupported()
_OFF = Unsupported((False,))
_EMPTY = Unsupported(([], {}, ""))
_TEXT_ONLY = Unsupported(({}, {"type": "text"}), "only {'type': 'text'} is supported")

BOTH: dict[str, Unsupported] = {
    "logit_bias": _EMPTY,
    "prompt_logprobs": _UNSUPPORTED,
    "logprob_token_ids": _EMPTY,
    "return_tokens_as_token_ids": _OFF,
    "return_token_offsets": _OFF,
    "allowed_token_ids": _UNSUPPORTED,
    "bad_words": _EMPTY,
    "logits_processors": _EMPTY,
    "use_beam_search": _OFF,
    "watermarking": _OFF,
    "repetition_detection": _UNSUPPORTED,
    "thinking_token_budget": _UNSUPPORTED,
    "truncate_prompt_tokens": Unsupported((), "prompts are not truncated; send it as short as it should be"),
    "spaces_between_special_tokens": Unsupported((True,)),
    "priority": Unsupported((0,), "requests are served first come, first served; leave it out"),
    "response_format": _TEXT_ONLY,
    "structured_outputs": _EMPTY,
    "guided_json": _UNSUPPORTED,
    "guided_regex": _UNSUPPORTED,
    "guided_choice": _UNSUPPORTED,
    "guided_grammar": _UNSUPPORTED,
    "vllm_xargs": _EMPTY,
    "ec_transfer_params": _EMPTY,
}

COMPLETIONS: dict[str, Unsupported] = BOTH | {
    "echo": Unsupported((False,), "the prompt is not repeated in the answer; send the request without echo"),
    "suffix": Unsupported(("",), "insertion is not supported; put everything into prompt"),
    "prompt_embeds": _EMPTY,
    "add_special_tokens": Unsupported((True,)),
}

CHAT: dict[str, Unsupported] = BOTH | {
    "echo": Unsupported((False,), "the message is not repeated in the answer; send the request without echo"),
    "tools": Unsupported(([],), "tool calls are not supported; describe the tools in a message instead"),
    "tool_choice": Unsupported(("none", "auto"), "tool calls are not supported; leave it out"),
    "functions": Unsupported(([],), "tool calls are not supported; describe the functions in a message instead"),
    "function_call": Unsupported(("none", "auto"), "tool calls are not supported; leave it out"),
    "reasoning_effort": _UNSUPPORTED,
    "documents": _EMPTY,
    "chat_template": Unsupported((), "a request cannot bring its own template; the model's is used"),
    "add_special_tokens": _OFF,
    "return_prompt_text": _OFF,
    "modalities": Unsupported((["text"],), "only ['text'] is supported"),
    "audio": _UNSUPPORTED,
    "web_search_options": _UNSUPPORTED,
}


def refuse_unsupported(body: Mapping[str, Any], fields: Mapping[str, Unsupported]) -> None:
    """Raises `ApiError` 400 for the first of ``fields`` that ``body`` has and that asks for something."""
    for name, value in body.items():
        field = fields.get(name)
        if field is not None and value is not None and value not in field.harmless:
            raise ApiError(400, f"{name}: {field.advice}", param=name, code="unsupported_value")
