"""A running server over HTTP, for `pdkv verify`: its metrics, its models, and one completion of known length."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Any

import msgspec

from pdkv.errors import ConfigError
from pdkv.logs.scrape import fetch_json, metrics_url, scrape, sibling_url
from pdkv.plan.verify import Server

_ANSWER_TIMEOUT_S = 300.0
# Token ids of every vocabulary; a run of different ones, so that no prefix of it is likely to be cached.
_FIRST_ID, _IDS = 100, 150


def connect(url: str) -> Server:
    """The server at ``url``; nothing is asked of it yet. Raises ConfigError for what is no URL."""
    metrics_url(url)

    def models() -> Any:
        return fetch_json(sibling_url(url, "/v1/models"))

    return Server(url, lambda: scrape(url), models, lambda prompt, output: _complete(url, models(), prompt, output))


def _complete(url: str, models: Any, prompt_tokens: int, output_tokens: int) -> None:
    """Send one completion and wait for its answer. Raises ConfigError when it is refused."""
    listed = models.get("data") if isinstance(models, dict) else None
    if not listed or not isinstance(listed[0], dict) or not isinstance(listed[0].get("id"), str):
        raise ConfigError(f"{url} lists no model at /v1/models; a probe needs one to ask")
    body = {
        "model": listed[0]["id"],
        "prompt": [_FIRST_ID + index * 7 % _IDS for index in range(prompt_tokens)],
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        sibling_url(url, "/v1/completions"), msgspec.json.encode(body), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as answer:
            answer.read(1 << 20)
    except urllib.error.HTTPError as error:
        said = error.read(300).decode("utf-8", "replace")
        raise ConfigError(f"{url} refused the probe with {error.code}: {said}") from error
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise ConfigError(f"{url} did not answer the probe: {getattr(error, 'reason', None) or error}") from error
