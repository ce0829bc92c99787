"""Request schemas of the OpenAI completions and chat APIs (with vLLM's extra fields), and error objects.

Unknown fields are ignored, as clients and routers send many. Those whose meaning cannot be honoured are refused before
(`unsupported`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pdkv.errors import BadRequest
from pdkv.runtime.shown import readable
from pdkv.serve.params import ORDINARY, TransferRequest, parse_params

MAX_CHOICES = 64
MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
MAX_SEQUENCES = 128
MAX_STOP_TOKENS = 1024
MAX_MESSAGE_CHARS = 2000
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        *("conversation", "conversations", "messages", "tools", "documents", "chat_template", "tokenize", "padding"),
        *("add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Names in ``chat_template_kwargs`` that would not reach the template as variables: they steer the tokenizer."""


class ApiError(Exception):
    """An answer that is an OpenAI error object. ``status`` is the HTTP status."""

    def __init__(
        self, status: int, message: str, *, kind: str | None = None, param: str | None = None, code: str | None = None
    ) -> None:
        self.message = readable(message, MAX_MESSAGE_CHARS)  # much of it may be the client's own text
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else readable(param)
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The JSON body: ``{"error": {message, type, param, code}}``."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


class StreamOptions(BaseModel):
    """``stream_options``: a last chunk with the usage, or the usage so far in every chunk."""

    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Common(BaseModel):
    """Fields that both APIs share; ``None`` means not given."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | list[dict[str, Any] | None] | None = None


class CompletionRequest(_Common):
    """Body of ``POST /v1/completions``. ``prompt`` is checked by `prompts_of`."""

    prompt: Any = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatMessage(BaseModel):
    """One message of a conversation; ``content`` is text or a list of text parts."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(_Common):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What either API asks for, in one form. ``sampling`` are keyword arguments of `SamplingParams`.

    ``max_tokens`` None means as many as fit behind the prompt. ``transfers[i]`` belongs to prompt i (empty: ordinary).
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    cache_salt: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    transfers: tuple[TransferRequest, ...] = ()

    def transfer(self, prompt: int) -> TransferRequest:
        """What prompt number ``prompt`` asks of the KV transfer."""
        return self.transfers[prompt] if self.transfers else ORDINARY


Schema = TypeVar("Schema", bound=BaseModel)


def parse_request(schema: type[Schema], body: Mapping[str, Any]) -> Schema:
    """``body`` as ``schema``. Raises `ApiError` 400 naming the first field that is wrong and what it must be."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field_name = ".".join(str(part) for part in first["loc"] if not str(part).endswith("]")) or "body"
        param = str(first["loc"][0]) if first["loc"] else None
        got = "" if first["type"] == "missing" else f", got {_short(first['input'])}"
        raise ApiError(400, f"{field_name}: {first['msg']}{got}", param=param, code="invalid_value") from None


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts, each text or token ids. Raises `ApiError` for anything that is none of the four forms."""
    value = request.prompt
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(_is_token(item) for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(isinstance(item, list) and item and all(_is_token(t) for t in item) for item in value):
            return list(value)
    raise ApiError(
        400,
        "prompt: give a string, a list of strings, a list of token ids or a list of lists of token ids "
        f"(none of them empty), got {_short(value)}",
        param="prompt",
        code="invalid_value",
    )


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def completion_generation(request: CompletionRequest, num_prompts: int) -> Generation:
    """The `Generation` of a completion. Raises `ApiError` or `BadRequest` naming the field that cannot be served."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        _refuse("best_of", f"{request.best_of} differs from n = {request.n or 1}; ask for n choices and rank them")
    _within("logprobs", request.logprobs, 0, MAX_TOP_LOGPROBS)
    return _generation(request, num_prompts, logprobs=request.logprobs, default_max_tokens=DEFAULT_COMPLETION_TOKENS)


def chat_generation(request: ChatRequest) -> Generation:
    """The `Generation` of a chat turn. Raises `ApiError` or `BadRequest` naming the field that cannot be served."""
    if not request.messages:
        raise ApiError(400, "messages: at least one message is needed", param="messages", code="invalid_value")
    if request.top_logprobs is not None and not request.logprobs:
        _refuse("top_logprobs", "needs logprobs = true")
    if reserved := sorted(RESERVED_TEMPLATE_KWARGS & set(request.chat_template_kwargs or ())):
        _refuse(
            "chat_template_kwargs",
            f"{', '.join(reserved)}: not a variable of a template; add_generation_prompt and continue_final_message "
            "are fields of the request itself, the others are not supported",
        )
    _within("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _generation(request, 1, logprobs=logprobs, default_max_tokens=None)


def _generation(
    request: _Common, num_prompts: int, *, logprobs: int | None, default_max_tokens: int | None
) -> Generation:
    _within("n", request.n, 1, MAX_CHOICES)
    check_answers(num_prompts, request.n or 1)
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    param = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    _within(param, asked, 1, None)
    max_tokens = asked if asked is not None else default_max_tokens
    _within("min_tokens", request.min_tokens, 0, max_tokens)
    if request.cache_salt == "":
        _refuse("cache_salt", "must not be empty; leave it out to share the prefix cache")
    if (stop_tokens := len(request.stop_token_ids or ())) > MAX_STOP_TOKENS:
        _refuse("stop_token_ids", f"{stop_tokens} tokens; at most {MAX_STOP_TOKENS} are looked for")
    options = request.stream_options
    if options is not None and not request.stream:
        _refuse("stream_options", "needs stream = true")
    return Generation(
        n=request.n or 1,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop=_stops(request.stop),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        token_ids=bool(request.return_token_ids),
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        cache_salt=request.cache_salt,
        sampling=_sampling(request, logprobs),
        transfers=_transfers(request.kv_transfer_params, num_prompts),
    )


def check_answers(num_prompts: int, n: int) -> None:
    """Raises `ApiError` when ``num_prompts`` prompts with ``n`` answers each are more than one request may ask for."""
    answers = num_prompts * n
    if answers > MAX_SEQUENCES:
        _refuse(
            "prompt",
            f"{num_prompts} prompts with n = {n} ask for {answers} answers, and one request may ask for "
            f"{MAX_SEQUENCES}; send several requests",
        )


def _sampling(request: _Common, logprobs: int | None) -> dict[str, Any]:
    names = (
        "temperature", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    )  # fmt: skip
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if request.top_k is not None:
        given["top_k"] = 0 if request.top_k == -1 else request.top_k  # -1 is vLLM's "off" on the wire, 0 is ours
    if logprobs is not None:
        given["logprobs"] = logprobs
    return given


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        _refuse("stop", f"{len(stops)} strings; at most {MAX_STOP_STRINGS} are looked for")
    if any(not text for text in stops):
        _refuse("stop", "an empty string would stop every answer at once; leave it out")
    return stops


def _transfers(params: dict[str, Any] | list[dict[str, Any] | None] | None, count: int) -> tuple[TransferRequest, ...]:
    if params is None:
        return ()
    if isinstance(params, dict):
        if count > 1:
            parsed = parse_params(params)
            if parsed.offer is not None or parsed.transfer_id is not None:
                raise BadRequest(
                    f"kv_transfer_params: one object cannot describe the KV of {count} prompts; "
                    "give a list with one object (or null) per prompt, or send the prompts one by one"
                )
            return (parsed,) * count
        return (parse_params(params),)
    if len(params) != count:
        raise BadRequest(f"kv_transfer_params: {len(params)} objects for {count} prompts; give one (or null) for each")
    return tuple(parse_params(item) for item in params)


def _within(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is None or (value >= low and (high is None or value <= high)):
        return
    allowed = f"at least {low}" if high is None else f"from {low} to {high}"
    raise ApiError(400, f"{name}: {value} is out of range; use a value {allowed}", param=name, code="invalid_value")


def _refuse(name: str, text: str) -> None:
    raise ApiError(400, f"{name}: {text}", param=name, code="unsupported_value")
