"""No field that would change an answer is dropped silently."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.serve.client import CHAT, COMPLETIONS, post
from tests.serve.fake import FakeInstance

from pdkv.serve import unsupported
from pdkv.serve.openai import ChatRequest, CompletionRequest

BOTH = re.findall(
    r"\w+",
    """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
    temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
    logprob_token_ids bad_words echo add_special_tokens response_format structured_outputs priority request_id
    session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection thinking_token_budget stream_interval
    """,
)
FIELDS = {  # of vLLM 0.32's CompletionRequest and ChatCompletionRequest
    COMPLETIONS: [*BOTH, "prompt", "suffix", "prompt_embeds"],
    CHAT: [
        *(*BOTH, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "reasoning_effort"),
        *("include_reasoning", "parallel_tool_calls", "add_generation_prompt", "continue_final_message", "documents"),
        *("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text"),
    ],
}
WITHOUT_EFFECT = {
    "length_penalty": "of a beam search",
    "truncation_side": "of truncate_prompt_tokens",
    "include_reasoning": "no reasoning is told apart",
    "parallel_tool_calls": "there are no tools",
    "media_io_kwargs": "there are no media",
    "mm_processor_kwargs": "there are no media",
    "mm_payload": "there are no media",
    "return_mm_kwargs": "there are no media",
    "routed_experts_prompt_start": "routed experts are not returned",
    "stream_interval": "how a stream is cut",
    "request_id": "a name",
    "session_id": "a name",
}
SCHEMAS = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}
TABLES = {COMPLETIONS: unsupported.COMPLETIONS, CHAT: unsupported.CHAT}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_field_of_vllm_is_served_refused_or_known_to_have_no_effect(path: str) -> None:
    for name in FIELDS[path]:
        ways = name in SCHEMAS[path].model_fields, name in TABLES[path], name in WITHOUT_EFFECT
        assert sum(ways) == 1, (name, ways)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, table in TABLES.items() for name in table])
def test_a_field_that_is_not_served_is_refused_unless_it_asks_for_nothing(path: str, name: str) -> None:
    instance = FakeInstance()
    harmless = [None, *TABLES[path][name].harmless]
    for asked in [value for value in (True, 1, {"x": 1}, [5], "x") if value not in harmless]:
        response = post(instance, path, BODIES[path] | {name: asked})
        assert response.status_code == 400, (asked, response.text)
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_value")
    assert not instance.requests
    for value in harmless:
        assert post(instance, path, BODIES[path] | {name: value}).status_code == 200, value
