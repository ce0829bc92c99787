"""An instance without an engine: the interface of `runtime.instance.Instance`, answering from a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdkv.core.events import Admitted, Event, Finished, FinishReason, LoadFailed, TokenSampled
from pdkv.core.ports import HolderView, MemoryView, NewRequest
from pdkv.core.transfer.messages import Awaited, Grant, RemoteSource
from pdkv.runtime.instance import Stats, Update
from pdkv.runtime.sampler import SamplingParams, TokenLogprobs
from pdkv.runtime.transfer_stats import TransferStats

EOS = 256
IM_END = 257
GRANT = Grant(
    block_ids=(3, 1, 7),
    block_size=16,
    num_tokens=40,
    slot=5,
    nonce=2**63 + 1,
    lease_id=2**60 + 7,
    token=bytes(range(16)),
    proof=bytes(range(16, 32)),
    cached_tokens=16,
)


class ByteTokenizer:
    """One token per byte (byte-level, so characters are torn), and two special tokens."""

    def __init__(self, *, chat: bool = True) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        self._inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._inner.decoder = decoders.ByteLevel()
        self._inner.add_special_tokens(["<eos>", "<end>"])
        self.template_options: dict[str, Any] = {}
        self.on_call: Callable[[str], None] = lambda text: None
        self.chat_template = "there is one" if chat else None

    @property
    def backend_tokenizer(self) -> Tokenizer:
        return self._inner

    def get_vocab(self) -> dict[str, int]:
        return self._inner.get_vocab()

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        self.on_call(text)
        return {"input_ids": self._inner.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        self.template_options = options
        if messages[0]["role"] == "unknown":
            raise ValueError("roles must alternate")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return text + ("<assistant>" if options["add_generation_prompt"] else "")


@dataclass
class FakeModel:
    tokenizer: ByteTokenizer | None = field(default_factory=ByteTokenizer)
    eos_token_ids: frozenset[int] = frozenset({EOS})
    vocab_size: int = 258


@dataclass
class FakeInfo:
    role: str = "decode"
    engine_id: str = "engine-1"
    model_name: str = "tiny"
    num_blocks: int = 100
    bytes_per_block: int = 1024
    block_size: int = 16
    tensor_parallel_size: int = 1
    max_model_len: int = 512
    transport: str = "shm"
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 5600
    bidirectional: bool = False


Script = Callable[[NewRequest], list[int]]


class FakeInstance:
    """Answers with ``script(request)`` on a thread each; ``gate`` (when set up) holds tokens back after ``gate_at``."""

    def __init__(self, script: Script | str = "Hello world", **info: Any) -> None:
        self.info = FakeInfo(**info)
        self.model = FakeModel()
        self.failed: BaseException | None = None
        self.requests: list[NewRequest] = []
        self.samplings: list[SamplingParams] = []
        self.aborts: list[tuple[str, FinishReason]] = []
        self.released: list[RemoteSource | Awaited] = []
        self.refuse: Exception | None = None
        self.error: str | None = None
        self.load_failure: str | None = None
        self.transfer = TransferStats(heartbeats_sent=9)
        self.gate: threading.Event | None = None
        self.gate_at = 0
        self.on_events: Callable[[tuple[Event, ...]], None] = lambda events: None
        self._script = script if callable(script) else lambda request: self.tokens(script)
        self._ended: dict[str, FinishReason] = {}

    def tokens(self, text: str) -> list[int]:
        assert self.model.tokenizer is not None
        return self.model.tokenizer(text)["input_ids"]

    def submit(self, request: NewRequest, sampling: SamplingParams, sink: Callable[[Update], None]) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        self.samplings.append(sampling)
        threading.Thread(target=self._answer, args=(request, sampling, sink), daemon=True).start()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self.aborts.append((request_id, reason))
        self._ended[request_id] = reason
        if self.gate is not None:
            self.gate.set()

    def release(self, offer: RemoteSource | Awaited) -> None:
        self.released.append(offer)

    def memory(self) -> MemoryView:
        now = time.monotonic_ns()
        holder = HolderView(
            request_id="r1",
            account="loading",
            blocks=4,
            cause="reading",
            since_ns=now - 10**9,
            deadline_ns=now + 2 * 10**9,
        )
        accounts = {"null": 1, "free": 80, "cached": 5, "running": 10, "loading": 4}
        return MemoryView(num_blocks=100, block_size=16, accounts=accounts, peaks=dict(accounts), holders=(holder,))

    def stats(self) -> Stats:
        return Stats(running=1, waiting=3, loading=2, transfer=self.transfer)

    def _answer(self, request: NewRequest, sampling: SamplingParams, sink: Callable[[Update], None]) -> None:
        rid, at = request.request_id, time.monotonic_ns()

        def say(*events: Event, logprobs: TokenLogprobs | None = None) -> None:
            self.on_events(events)
            sink(Update(rid, events, logprobs))

        if self.load_failure is not None and request.source is not None:
            say(LoadFailed(request_id=rid, at_ns=at, handle=1, cause=self.load_failure))
        say(Admitted(request_id=rid, at_ns=at, prompt_tokens=len(request.prompt), local_tokens=0, external_tokens=0))
        tokens, sent = self._script(request), 0
        reason = FinishReason.LENGTH
        for i in range(min(len(tokens), request.max_tokens)):
            if self.gate is not None and i == self.gate_at:
                self.gate.wait(20)
            if rid in self._ended:
                reason = self._ended[rid]
                break
            if self.error is not None and i == self.gate_at:
                reason = FinishReason.ERROR
                break
            token, sent = tokens[i], i + 1
            stops = token in request.stop_token_ids and sent >= request.min_tokens
            event = TokenSampled(request_id=rid, at_ns=time.monotonic_ns(), token=token)
            top = tuple((t, -0.5 - t) for t in range(sampling.logprobs or 0))
            logprobs = TokenLogprobs(token, -0.25, 1, top) if sampling.logprobs is not None else None
            if stops or i + 1 == min(len(tokens), request.max_tokens):
                say(event, self._finished(request, FinishReason.STOP if stops else reason, sent), logprobs=logprobs)
                return
            say(event, logprobs=logprobs)
        say(self._finished(request, reason, sent))

    def _finished(self, request: NewRequest, reason: FinishReason, sent: int) -> Finished:
        return Finished(
            request_id=request.request_id,
            at_ns=time.monotonic_ns(),
            reason=reason,
            prompt_tokens=len(request.prompt),
            output_tokens=sent,
            cached_tokens=16 if request.source is not None else 0,
            error=self.error if reason is FinishReason.ERROR else None,
            lease=GRANT if request.produce or request.keep_turn else None,
            kept_until_ns=480 * 10**9 if request.keep_turn else None,
        )
