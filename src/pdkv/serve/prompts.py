"""Prompts to tokens: text, token ids and conversations, on a thread, and refused first where they are too long."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from pdkv.core.ports import Int32Array
from pdkv.errors import BadRequest
from pdkv.runtime.shown import readable
from pdkv.serve.engine import ServedInstance
from pdkv.serve.openai import ApiError, ChatMessage, ChatRequest
from pdkv.serve.prompt_size import most_characters, token_bound

_LONG_TEXT = 1 << 18  # characters; shorter ones are tokenised within a second, whatever they are


class Prompts:
    """Encodes for one instance."""

    def __init__(self, instance: ServedInstance) -> None:
        self._instance = instance
        # One thread: a Hugging Face tokenizer cannot be called from several, and long prompts must not stop the loop.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pdkv-tokenizer")
        self._bound = functools.cache(lambda: token_bound(instance.model.tokenizer))
        self._most_characters = functools.cache(
            lambda: max(_LONG_TEXT, most_characters(instance.model.tokenizer, instance.info.max_model_len))
        )

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def room(self, prompt_tokens: int, how_exact: str = "") -> int:
        """Tokens left for the answer, at least one. Raises `BadRequest` when there is none."""
        limit = self._instance.info.max_model_len
        if prompt_tokens >= limit:
            raise BadRequest(
                f"the prompt has {how_exact}{prompt_tokens} tokens, but the model's context is {limit} tokens and at "
                "least one must be left for the answer; shorten the prompt"
            )
        return limit - prompt_tokens

    async def encode(self, prompt: str | list[int]) -> Int32Array:
        """The prompt as int32[n], n >= 1. Raises `BadRequest` for ids outside the vocabulary or an empty prompt."""
        if isinstance(prompt, str):
            tokens = await self._on_thread(self._encode_text, prompt, True)
        else:
            self.room(len(prompt))
            vocab_size = self._instance.model.vocab_size
            wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise BadRequest(f"prompt: token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})")
            tokens = np.asarray(prompt, dtype=np.int32)
        if tokens.size == 0:
            raise BadRequest("prompt: it has no tokens; give at least one character")
        return tokens

    async def encode_chat(self, request: ChatRequest) -> Int32Array:
        """The conversation as int32[n] by the model's chat template. Raises `ApiError` when it has none or refuses."""
        if getattr(self._instance.model.tokenizer, "chat_template", None) is None:
            raise ApiError(
                400,
                f"the model {self._instance.info.model_name} has no chat template (it is a base model); "
                "use /v1/completions",
                code="no_chat_template",
            )
        messages = [_plain_message(message, i) for i, message in enumerate(request.messages)]
        tokens = await self._on_thread(self._encode_messages, messages, request)
        if tokens.size == 0:
            raise BadRequest("messages: the chat template made no tokens of them")
        return tokens

    async def _on_thread(self, function: Callable[..., Int32Array], *args: Any) -> Int32Array:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _encode_text(self, text: str, add_special_tokens: bool) -> Int32Array:
        if self._instance.model.tokenizer is None:
            raise BadRequest(f"the model {self._instance.info.model_name} has no tokenizer; send prompts as token ids")
        if len(text) > _LONG_TEXT:
            self._refuse_too_long(text)
        ids = self._instance.model.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def _refuse_too_long(self, text: str) -> None:
        """Raises `BadRequest` for what would keep the tokenizer busy, to be refused afterwards."""
        if (bound := self._bound()) is not None:
            self.room(bound.tokens_at_least(text), "at least ")
        if len(text) > (most := self._most_characters()):
            raise BadRequest(
                f"the prompt has {len(text)} characters; with a context of {self._instance.info.max_model_len} tokens "
                f"at most {most} are tokenised here. Shorten it, or send it as token ids"
            )

    def _encode_messages(self, messages: list[dict[str, Any]], request: ChatRequest) -> Int32Array:
        continued = bool(request.continue_final_message)
        asked = request.add_generation_prompt
        try:
            text = self._instance.model.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not continued if asked is None else asked,
                continue_final_message=continued,
                **(request.chat_template_kwargs or {}),
            )
        except Exception as error:  # a template is the model's own program: whatever it raises is about the messages
            text = f"messages: the model's chat template refused them: {error}"
            raise ApiError(400, text, param="messages") from None
        return self._encode_text(text, False)


def _plain_message(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message as templates expect it: ``content`` as one string. Raises `ApiError` for images and the like."""
    plain = message.model_dump(exclude_none=True)
    parts = plain.get("content")
    if isinstance(parts, list):
        for part in parts:
            is_text = part.get("type") == "text"
            if not is_text or not isinstance(part.get("text"), str):
                kind = readable(repr(part.get("type")))
                wrong = "a part of type 'text' needs a string named text" if is_text else (
                    f"parts of type {kind} are not supported; send text only"
                )  # fmt: skip
                code = "invalid_value" if is_text else "unsupported_value"
                raise ApiError(400, f"messages.{index}.content: {wrong}", param="messages", code=code)
        plain["content"] = "\n".join(part["text"] for part in parts)
    plain.setdefault("content", "")
    return plain
