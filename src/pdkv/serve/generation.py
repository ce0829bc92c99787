"""From a parsed API request to the instance and back: choices to requests, updates to text, aborts for who left."""

from __future__ import annotations

import asyncio
import enum
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pdkv.core.events import Admitted, Finished, FinishReason, LoadFailed, TokenSampled, TurnDeclined
from pdkv.core.ports import Int32Array, NewRequest
from pdkv.core.transfer.messages import Awaited, RemoteSource
from pdkv.errors import BadRequest
from pdkv.runtime.sampler import SamplingParams, TokenLogprobs
from pdkv.serve.detokenizer import TextStream
from pdkv.serve.engine import ServedInstance, UpdateLike
from pdkv.serve.openai import ApiError, Generation
from pdkv.serve.params import TransferRequest, grant_to_params, named
from pdkv.serve.peer_names import PeerNames
from pdkv.serve.prompts import Prompts
from pdkv.serve.queue_limits import NO_LIMITS, QueueGate, QueueLimits, Rejections

_FAILED_CHECK_S = 2.0


class Kv(enum.Enum):
    """What became of the KV that a request's ``kv_transfer_params`` promised; worst first."""

    RECOMPUTED = "recomputed"
    LOADED = "loaded"
    CACHED = "cached"  # not needed: the prompt was in the prefix cache here, or (the turn before) near enough


@dataclass(frozen=True, slots=True)
class Delta:
    """What one update adds to a choice. ``finished`` is set on the last one, with its ``finish_reason``."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: Finished | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Choice:
    """One sequence to generate: choice ``index`` of the answer, belonging to prompt number ``prompt_index``."""

    index: int
    prompt_index: int
    request: NewRequest
    sampling: SamplingParams
    text: TextStream
    updates: asyncio.Queue[UpdateLike] = field(default_factory=asyncio.Queue)
    after: asyncio.Event | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    kv: Kv | None = None  # None: nothing promised, or not decided yet
    submitted: bool = False
    ended: bool = False


class Arrivals(Rejections, Protocol):
    """Who is told of submissions (telemetry): before each, and again when the instance refused it.

    And of answers that a full queue turned away.
    """

    def arrived(self, request_id: str, *, fetches: bool) -> None: ...

    def refused(self, request_id: str) -> None: ...


class Frontend:
    """Submits to one instance on behalf of the event loop that it is used from."""

    def __init__(self, instance: ServedInstance, arrivals: Arrivals, limits: QueueLimits = NO_LIMITS) -> None:
        self.instance = instance
        self.prompts = Prompts(instance)
        self._gate = QueueGate(limits, arrivals)
        self._arrivals = arrivals
        self._names = PeerNames()

    def close(self) -> None:
        """Stop the tokenizer thread and all look-ups."""
        self.prompts.close()
        self._names.close()

    async def with_addresses(self, generation: Generation) -> Generation:
        """``generation`` with the peers' host names looked up."""

        async def one(transfer: TransferRequest) -> TransferRequest:
            offer = transfer.source or transfer.awaited
            if offer is not None and offer.peer.engine_id == self.instance.info.engine_id:
                raise BadRequest(
                    "kv_transfer_params: this grant is my own, it came from this instance; send the request to a "
                    "decode instance (in the router: is one URL under both --prefill and --decode?)"
                )
            if transfer.source is not None:
                source = await self._names.resolve(transfer.source)
                if not transfer.produce or self.instance.info.bidirectional:
                    return replace(transfer, source=source)
                self.instance.release(source)  # the turn before is not read here
                return replace(transfer, source=None)
            if transfer.awaited is not None:
                return TransferRequest(awaited=await self._names.resolve(transfer.awaited))
            return transfer

        return replace(generation, transfers=tuple(await asyncio.gather(*map(one, generation.transfers))))

    def plan(self, prompts: Sequence[Int32Array], generation: Generation, base_id: str) -> list[Choice]:
        """The choices of a request, prompt by prompt, not yet submitted. Raises `BadRequest`."""
        model = self.instance.model
        wrong = next((token for token in generation.stop_token_ids if not 0 <= token < model.vocab_size), None)
        if wrong is not None:
            raise BadRequest(f"stop_token_ids: {wrong} is outside the vocabulary (0 to {model.vocab_size - 1})")
        if generation.stop and model.tokenizer is None:
            raise BadRequest("stop: the model has no tokenizer, so its answers have no text; give stop_token_ids")
        choices: list[Choice] = []
        answer_id = f"{base_id}-{uuid.uuid4().hex[:8]}" if len(prompts) > 1 else None
        for prompt_index, prompt in enumerate(prompts):
            max_tokens = self._max_tokens(len(prompt), generation)
            transfer = named(generation.transfer(prompt_index), f"{base_id}-{prompt_index}")
            stop_ids = generation.stop_token_ids
            if not generation.ignore_eos:
                stop_ids |= frozenset(int(token) for token in model.eos_token_ids)
            for i in range(generation.n):
                first = i == 0
                request = NewRequest(
                    request_id=f"{base_id}-{len(choices)}-{uuid.uuid4().hex[:8]}",
                    prompt=prompt,
                    max_tokens=max_tokens,
                    min_tokens=generation.min_tokens,
                    stop_token_ids=stop_ids,
                    cache_salt=generation.cache_salt,
                    answer_id=answer_id,
                    produce=transfer.produce and first,
                    transfer_id=transfer.transfer_id if first else None,
                    source=transfer.source if first else None,
                    awaited=transfer.awaited if first else None,
                    keep_turn=self.instance.info.bidirectional and first and _decodes_pulled(transfer),
                )
                text = TextStream(
                    model.tokenizer,
                    prompt.tolist(),
                    stops=generation.stop,
                    include_stop=generation.include_stop,
                    stop_token_ids=stop_ids,
                    min_tokens=generation.min_tokens,
                    skip_special_tokens=generation.skip_special_tokens,
                )
                choice = Choice(len(choices), prompt_index, request, self._sampling(generation, i), text)
                if not first and transfer.offer is not None:
                    # One lease is read once. The siblings start when the first has its prompt's KV, and hit the cache.
                    choice.after = choices[len(choices) - i].started
                choices.append(choice)
        return choices

    def _sampling(self, generation: Generation, sibling: int) -> SamplingParams:
        given = dict(generation.sampling)
        if "seed" in given:
            given["seed"] += sibling
        sampling = SamplingParams(**given)
        sampling.validate()
        return sampling

    def _max_tokens(self, prompt_tokens: int, generation: Generation) -> int:
        room = self.prompts.room(prompt_tokens)
        if generation.max_tokens is None:
            return room
        if generation.max_tokens > room:
            raise BadRequest(
                f"max_tokens = {generation.max_tokens} and a prompt of {prompt_tokens} tokens need "
                f"{generation.max_tokens + prompt_tokens} tokens, but the model's context is {room + prompt_tokens}; "
                f"ask for at most {room} or shorten the prompt"
            )
        return generation.max_tokens

    def submit(self, choices: Sequence[Choice]) -> None:
        """Submit the choices that need not wait for a sibling. After an error (raised) none of them is left running.

        Raises `ApiError` 503 when a queue limit leaves no room for all of them.
        """
        try:
            self._gate.check(len(choices))
            for choice in choices:
                self._gate.enter(choice.request)
            for choice in choices:
                if choice.after is None:
                    self._submit(choice)
        except BaseException:
            self.abandon(choices)
            raise

    def _submit(self, choice: Choice) -> None:
        loop = asyncio.get_running_loop()

        def sink(update: UpdateLike) -> None:
            try:
                loop.call_soon_threadsafe(choice.updates.put_nowait, update)
            except RuntimeError:  # the loop is closed: the server is going down and nobody waits for this answer
                pass

        self._arrivals.arrived(choice.request.request_id, fetches=_offer(choice) is not None)
        try:
            self.instance.submit(choice.request, choice.sampling, sink)
        except BaseException:
            self._arrivals.refused(choice.request.request_id)
            raise
        choice.submitted = True

    def abandon(self, choices: Sequence[Choice]) -> None:
        """Nobody gets this answer: abort what still runs or has kept KV, give back grants of what was not submitted."""
        for choice in choices:
            self._gate.leave(choice.request)
            keeps = choice.request.produce or choice.request.keep_turn
            if choice.submitted and (keeps or not choice.ended):
                choice.ended = True
                self.instance.abort(choice.request.request_id, FinishReason.ABORT)
            elif not choice.submitted and (offer := _offer(choice)) is not None:
                self.instance.release(offer)

    async def release(self, offers: Sequence[RemoteSource | Awaited]) -> None:
        """Give grants back that will never be used, because the request was refused."""
        for offer in offers:
            self.instance.release(await self._names.resolve(offer))

    async def deltas(self, choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Delta]]:
        """The deltas of all choices as they come. Ends when all have finished; leaving early aborts the rest.

        Raises `ApiError` when a choice ends in an error or the instance fails.
        """
        merged: asyncio.Queue[tuple[Choice, Delta | BaseException]] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            try:
                async for delta in self._choice_deltas(choice):
                    merged.put_nowait((choice, delta))
            except Exception as error:
                merged.put_nowait((choice, error))

        tasks = [asyncio.create_task(pump(choice)) for choice in choices]
        left = len(choices)
        try:
            while left:
                choice, delta = await merged.get()
                if isinstance(delta, BaseException):
                    raise delta
                left -= delta.finished is not None
                yield choice, delta
        finally:
            for task in tasks:
                task.cancel()
            if left:
                self.abandon(choices)

    async def _choice_deltas(self, choice: Choice) -> AsyncIterator[Delta]:
        if choice.after is not None:
            await choice.after.wait()
            self._submit(choice)
        try:
            while not choice.ended:
                delta = self._apply(choice, await self._next_update(choice))
                if delta is not None:
                    choice.started.set()
                    yield delta
        finally:
            choice.started.set()

    async def _next_update(self, choice: Choice) -> UpdateLike:
        """The next update; a failed instance may never send one, so its state is looked at now and then."""
        while True:
            try:
                return await asyncio.wait_for(choice.updates.get(), _FAILED_CHECK_S)
            except TimeoutError:
                self.check_alive()

    def check_alive(self) -> None:
        """Raises `ApiError` 503 with the reason when the instance has failed."""
        if (failure := self.instance.failed) is not None:
            reason = str(failure) or type(failure).__name__
            raise ApiError(503, f"the instance has stopped: {reason}", code="instance_failed")

    def _apply(self, choice: Choice, update: UpdateLike) -> Delta | None:
        """Fold one update into the choice's text; ``None`` when it shows nothing (admitted, loading, preempted)."""
        pieces: list[str] = []
        tokens: list[int] = []
        finished: Finished | None = None
        stopped_before = choice.text.stop is not None
        for event in update.events:
            if isinstance(event, TokenSampled) and choice.text.stop is None:
                pieces.append(choice.text.push(event.token))
                tokens.append(event.token)
            elif isinstance(event, Finished):
                finished = event
            elif isinstance(event, Admitted | LoadFailed | TurnDeclined):
                self._note_kv(choice, event)
        if finished is None:
            if choice.text.stop is not None and not stopped_before:
                self.instance.abort(choice.request.request_id, FinishReason.STOP)
            if not tokens:
                return None
        if tokens:
            self._gate.first_token(choice.request)
        logprobs = () if update.logprobs is None or not tokens else (update.logprobs,)
        if finished is None:
            return Delta("".join(pieces), tuple(tokens), logprobs)
        choice.ended = True
        self._gate.leave(choice.request)
        if finished.reason is FinishReason.ERROR:
            raise ApiError(500, finished.error or "the request failed inside the instance", code="request_failed")
        pieces.append(choice.text.finish())
        reason, stop_reason = self._outcome(choice, finished, tokens)
        return Delta("".join(pieces), tuple(tokens), logprobs, finished, reason, stop_reason)

    @staticmethod
    def _note_kv(choice: Choice, event: Admitted | LoadFailed | TurnDeclined) -> None:
        if not isinstance(event, Admitted):
            choice.kv = Kv.RECOMPUTED
        elif choice.kv is None and _offer(choice) is not None:
            choice.kv = Kv.LOADED if event.external_tokens else Kv.CACHED

    def _outcome(self, choice: Choice, finished: Finished, tokens: list[int]) -> tuple[str, str | int | None]:
        """Finish reason, and the stop string or stop token that ended it (``None`` for EOS and length)."""
        if choice.text.stop is not None:
            return FinishReason.STOP.value, choice.text.stop.stop
        eos = self.instance.model.eos_token_ids
        by_token = finished.reason is FinishReason.STOP and tokens and tokens[-1] not in eos
        return finished.reason.value, tokens[-1] if by_token else None

    def transfer_params(self, choice: Choice, finished: Finished) -> dict[str, Any] | None:
        """``kv_transfer_params`` of a finished prefill, or of an answer; ``None`` when its KV was not kept."""
        if finished.lease is None:
            return None
        info = self.instance.info
        return grant_to_params(
            finished.lease,
            engine_id=info.engine_id,
            request_id=choice.request.request_id,
            host=info.side_channel_host,
            port=info.side_channel_port,
            tp_size=info.tensor_parallel_size,
            kept_until_ns=finished.kept_until_ns,
        )


def _decodes_pulled(transfer: TransferRequest) -> bool:
    """Whether this is the decode leg of a pull: the one whose answer is kept for the next turn."""
    return transfer.source is not None and not transfer.produce


def _offer(choice: Choice) -> RemoteSource | Awaited | None:
    return choice.request.source or choice.request.awaited
