"""Answers of the OpenAI APIs: bodies, stream chunks, log probabilities in both shapes, usage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdkv.core.events import Finished
from pdkv.serve.generation import Choice, Delta

SSE_DONE = b"data: [DONE]\n\n"


def sse(chunk: dict[str, Any]) -> bytes:
    """One server-sent event with ``chunk`` as JSON."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


@dataclass(slots=True)
class ChoiceResult:
    """What a choice has produced so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finished: Finished | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Answer:
    """One request's answer in one of the two API shapes; folds deltas in and prints chunks and bodies.

    ``want_token_ids`` (vLLM's ``return_token_ids``) adds the tokens as they were sampled, and the prompt's: per choice
    in completions, once in a chat.
    """

    def __init__(
        self,
        *,
        chat: bool,
        answer_id: str,
        model: str,
        choices: Sequence[Choice],
        tokenizer: Any,
        want_logprobs: int | None,
        want_token_ids: bool = False,
    ) -> None:
        self._chat = chat
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._choices = choices
        self._tokenizer = tokenizer
        self._want = want_logprobs
        self._want_token_ids = want_token_ids
        self.results = [ChoiceResult() for _ in choices]

    def add(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """Fold ``delta`` in; returns its log probabilities in the chat shape (empty when not asked for)."""
        result = self.results[choice.index]
        entries = [] if self._want is None else [self._entry(item) for item in delta.logprobs]
        result.text += delta.text
        result.tokens += delta.tokens
        result.logprobs += entries
        if delta.finished is not None:
            result.finished, result.finish_reason = delta.finished, delta.finish_reason
            result.stop_reason = delta.stop_reason
        return entries

    def first_chunks(self) -> list[dict[str, Any]]:
        """Chunks sent before any text: the assistant's role of every chat choice."""
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": c.index, "delta": delta, "logprobs": None, "finish_reason": None}])
            | (self._prompt_ids(c) if c.index == 0 else {})
            for c in self._choices
        ]

    def chunk(self, choice: Choice, delta: Delta, *, with_usage: bool) -> dict[str, Any]:
        """Fold ``delta`` in and return the stream chunk for it."""
        so_far = self.results[choice.index]
        offset, first = len(so_far.text), not so_far.tokens
        entries = self.add(choice, delta)
        body: dict[str, Any] = {"index": choice.index}
        if self._chat:
            body["delta"] = {"content": delta.text}
        else:
            body["text"] = delta.text
        body |= {
            "logprobs": self._logprobs(entries, offset),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self._token_ids(delta.tokens),
            **(self._prompt_ids(choice) if first and not self._chat else {}),
        }
        chunk = self._chunk([body])
        if with_usage:
            chunk["usage"] = self.usage()
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of ``stream_options.include_usage``: no choices, the usage."""
        return self._chunk([]) | {"usage": self.usage()}

    def body(self, kv_transfer_params: Any) -> dict[str, Any]:
        """The whole answer of a request that did not stream."""
        choices = []
        for choice, result in zip(self._choices, self.results, strict=True):
            body: dict[str, Any] = {"index": choice.index}
            if self._chat:
                body["message"] = {"role": "assistant", "content": result.text}
            else:
                body["text"] = result.text
            choices.append(
                body
                | {
                    "logprobs": self._logprobs(result.logprobs, 0),
                    "finish_reason": result.finish_reason,
                    "stop_reason": result.stop_reason,
                    **self._token_ids(result.tokens),
                    **({} if self._chat else self._prompt_ids(choice)),
                }
            )
        kind = "chat.completion" if self._chat else "text_completion"
        return {
            **self._head,
            "object": kind,
            "choices": choices,
            "usage": self.usage(),
            "kv_transfer_params": kv_transfer_params,
            **(self._prompt_ids(self._choices[0]) if self._chat else {}),
        }

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts (each once) and answers; cached ones are those the first choice did not compute."""
        prompt_tokens = cached = 0
        seen: set[int] = set()
        for choice, result in zip(self._choices, self.results, strict=True):
            if choice.prompt_index not in seen:
                seen.add(choice.prompt_index)
                prompt_tokens += len(choice.request.prompt)
                cached += result.finished.cached_tokens if result.finished is not None else 0
        completion_tokens = sum(len(result.tokens) for result in self.results)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _token_ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": tokens} if self._want_token_ids else {}

    def _prompt_ids(self, choice: Choice) -> dict[str, Any]:
        return {"prompt_token_ids": choice.request.prompt.tolist()} if self._want_token_ids else {}

    def _entry(self, item: Any) -> dict[str, Any]:
        assert self._want is not None
        top = [self._token(token, logprob) for token, logprob in item.top[: self._want]]
        return self._token(item.token, item.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = "" if self._tokenizer is None else self._tokenizer.decode([token])
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}

    def _logprobs(self, entries: list[dict[str, Any]], text_offset: int) -> dict[str, Any] | None:
        """Entries in this API's shape. Completions: parallel lists, with the sampled token among the alternatives."""
        if self._want is None:
            return None
        if self._chat:
            return {"content": entries}
        offsets, at = [], text_offset
        for entry in entries:
            offsets.append(at)
            at += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{t["token"]: t["logprob"] for t in (*entry["top_logprobs"], entry)} for entry in entries],
            "text_offset": offsets,
        }
