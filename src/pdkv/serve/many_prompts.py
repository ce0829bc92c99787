"""A completion of several prompts at the router: each goes over P and D by itself, the answers come back as one.

Sent whole, all of them would have to be prefilled before D may read any: their leases add up until P may grant no more
(``--max-leased-fraction``), and whatever comes then waits for the first of them to expire. One by one, D reads each as
soon as it is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from pdkv.serve.http import JsonResponse, StreamResponse, as_api_error
from pdkv.serve.openai import MAX_CHOICES, ApiError, check_answers
from pdkv.serve.responses import SSE_DONE, sse

AT_ONCE = 16  # prompts of one request under way: enough to fill a batch of D, and others still get their turn at P
_UNSENT_CHUNKS = 64  # kept for a client that reads slowly; D's streams wait beyond
_ID_CHARS = 120  # of 128, the rest is for the prompt's number

Send = Callable[[dict[str, Any], str], Awaitable[Response]]
News = tuple[int, bytes | None]


def prompts_to_split(path: str, body: Mapping[str, Any]) -> list[Any] | None:
    """The prompts of a completion of more than one; ``None`` for all else.

    What is not well formed goes its way as it is, and an instance says what is wrong with it. Raises `ApiError` for
    more answers than one request may ask for.
    """
    prompts, n = body.get("prompt"), body.get("n")
    if path != "/v1/completions" or not isinstance(prompts, list) or len(prompts) < 2:
        return None
    if not (_all_are(str, prompts) or _all_are(list, prompts)):
        return None
    n = 1 if n is None else n
    if type(n) is not int or not 1 <= n <= MAX_CHOICES:
        return None
    check_answers(len(prompts), n)
    return prompts


def _all_are(kind: type, items: Iterable[object]) -> bool:
    return all(isinstance(item, kind) for item in items)


class _Refused(Exception):
    """One of the prompts was answered with an error, which then is the answer to all."""

    def __init__(self, status: int, body: bytes, media_type: str | None) -> None:
        super().__init__(status)
        self.status, self.body, self.media_type = status, body, media_type


class ManyPrompts:
    """One request's prompts. ``send`` answers a request of one prompt, given its body and its id.

    Leaving (cancelling `answer`, closing the streamed answer) cancels all that is under way.
    """

    def __init__(self, prompts: list[Any], body: dict[str, Any], request_id: str, send: Send) -> None:
        self._prompts, self._body, self._request_id, self._send = prompts, body, request_id, send
        self._choices_each = body.get("n") or 1
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._headers: dict[int, Mapping[str, str]] = {}
        self._created: Any = None

    async def answer(self) -> Response:
        """All answers in one, whole or as a stream; or the first error. Raises `ApiError`."""
        try:
            return await (self._streamed() if self._body.get("stream") is True else self._whole())
        except _Refused as error:
            headers = {"x-request-id": self._request_id}
            return Response(error.body, status_code=error.status, headers=headers, media_type=error.media_type)

    # ------------------------------------------------------------------------------------------------ prompt by prompt

    async def _news(self) -> AsyncGenerator[News]:
        """(number of the prompt, bytes of its answer) as they come, ``None`` behind the last. Raises `_Refused`."""
        queue: asyncio.Queue[tuple[int, bytes | Exception | None]] = asyncio.Queue(_UNSENT_CHUNKS)
        tasks = [asyncio.create_task(self._ask(index, queue)) for index in range(len(self._prompts))]
        try:
            left = len(tasks)
            while left:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                left -= item is None
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, index: int, queue: asyncio.Queue[tuple[int, bytes | Exception | None]]) -> None:
        body = {**self._body, "prompt": self._prompts[index]}
        try:
            async with self._at_once:
                response = await self._send(body, f"{self._request_id[:_ID_CHARS]}-{index}")
                if response.status_code != 200:
                    content = await _content(response)
                    raise _Refused(response.status_code, content, response.headers.get("content-type"))
                self._headers[index] = response.headers
                async with aclosing(_chunks(response)) as chunks:
                    async for chunk in chunks:
                        await queue.put((index, chunk))
                await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    def _head_of(self, answer: dict[str, Any]) -> dict[str, Any]:
        """What is the same in all answers and chunks."""
        if self._created is None:
            self._created = answer.get("created")
        return {"id": f"cmpl-{self._request_id}", "created": self._created}

    def _renumber(self, index: int, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of prompt ``index``, numbered as in one answer to all prompts."""
        choices: list[dict[str, Any]] = answer["choices"]
        return [choice | {"index": index * self._choices_each + choice["index"]} for choice in choices]

    def _answer_headers(self, indexes: Iterable[int]) -> dict[str, str]:
        """Headers of the router's own (``x-pdkv-…``); where prompts differ in one, it says so."""
        merged = {"x-request-id": self._request_id}
        for name, value in ((n, v) for i in indexes for n, v in self._headers[i].items() if n.startswith("x-pdkv-")):
            merged[name] = value if merged.get(name, value) == value else "mixed"
        return merged

    # ---------------------------------------------------------------------------------------------------------- whole

    async def _whole(self) -> Response:
        contents: dict[int, bytearray] = {index: bytearray() for index in range(len(self._prompts))}
        async with aclosing(self._news()) as news:
            async for index, chunk in news:
                contents[index] += chunk or b""
        answers = [_decoded(bytes(content)) for content in contents.values()]
        merged = {
            **answers[0],
            **self._head_of(answers[0]),
            "choices": [choice for index, answer in enumerate(answers) for choice in self._renumber(index, answer)],
            "usage": _sum([answer.get("usage") for answer in answers]),
        }
        return JsonResponse(merged, headers=self._answer_headers(contents))

    # --------------------------------------------------------------------------------------------------------- stream

    async def _streamed(self) -> Response:
        news = self._news()
        first = await anext(news)  # before the status line, so that what fails at once gets its status
        headers = self._answer_headers([first[0]])  # what becomes of the others nobody knows yet
        return StreamResponse(self._merged_events(first, news), headers=headers, cleanup=news.aclose)

    async def _merged_events(self, first: News, news: AsyncGenerator[News]) -> AsyncGenerator[bytes]:
        usage: dict[int, Any] = {}
        last: dict[str, Any] | None = None
        try:
            async for index, event in self._events(first, news):
                if "error" in event:
                    yield sse(event)
                    break
                event |= self._head_of(event)
                if event.get("usage") is not None:
                    usage[index] = event["usage"]
                    event["usage"] = _sum(usage.values())
                if event["choices"]:
                    yield sse(event | {"choices": self._renumber(index, event)})
                else:
                    last = event
            else:
                if last is not None:
                    yield sse(last | {"usage": _sum(usage.values())})
        except _Refused as error:
            yield b"data: " + error.body + b"\n\n"
        except Exception as error:  # the status line is gone: an event is the one way left to say it
            yield sse(as_api_error(error).body())
        yield SSE_DONE

    async def _events(self, first: News, news: AsyncGenerator[News]) -> AsyncGenerator[tuple[int, dict[str, Any]]]:
        """(number of the prompt, event) of all streams, without their ends."""
        rest: dict[int, bytes] = {}
        item: News | None = first
        while item is not None:
            index, chunk = item
            *events, rest[index] = (rest.get(index, b"") + (chunk or b"")).split(b"\n\n")
            for event in events:
                decoded = _event(event)
                if decoded is not None:
                    yield index, decoded
            item = await anext(news, None)


async def _chunks(response: Response) -> AsyncGenerator[bytes]:
    if not isinstance(response, StreamResponse):
        yield bytes(response.body)
        return
    async with response.opened() as chunks:
        async for chunk in chunks:
            yield chunk


async def _content(response: Response) -> bytes:
    async with aclosing(_chunks(response)) as chunks:
        return b"".join([chunk async for chunk in chunks])


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        _ = answer["choices"]
    except (msgspec.DecodeError, KeyError) as error:
        raise ApiError(502, f"a decode instance answered what is no completion: {error}") from None
    return answer


def _event(event: bytes) -> dict[str, Any] | None:
    """The JSON of a server-sent event; ``None`` for the end, a comment, or an event that broke off."""
    if event == SSE_DONE.strip():
        return None
    for at in (0, event.rfind(b"data: ")):  # the router puts the error right behind what broke off
        try:
            return msgspec.json.decode(event[at:].removeprefix(b"data: "), type=dict[str, Any])
        except msgspec.DecodeError:
            continue
    return None


def _sum(usages: Iterable[Any]) -> Any:
    """Counts added up, field by field; ``None`` where nobody gave any."""
    given = [usage for usage in usages if usage is not None]
    if not given:
        return None
    if all(isinstance(usage, dict) for usage in given):
        names = dict.fromkeys(name for usage in given for name in usage)
        return {name: _sum([usage.get(name) for usage in given]) for name in names}
    return sum(given)
