"""Requests that can never be served, refused with the numbers before they get into an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdkv.core.blocks.extra_keys import MultimodalItem
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.ports import NewRequest
from pdkv.core.transfer.messages import RemoteSource
from pdkv.core.transfer.pairs import granted_blocks, named_blocks, unlike_blocks
from pdkv.errors import BadRequest, DoesNotFit


def check_request(new: NewRequest, config: EngineConfig, manager: KVCacheManager) -> None:
    """Raises `BadRequest`, or `DoesNotFit` for a prompt larger than the whole pool."""
    length, limit = len(new.prompt), config.max_model_len
    if length == 0:
        raise BadRequest("the prompt is empty; send at least one token")
    if length + 1 > limit:
        raise BadRequest(
            f"the prompt has {length} tokens; with at least one to generate this instance takes at most "
            f"{limit - 1} (max_model_len {limit}). Shorten the prompt or start with a larger --max-model-len"
        )
    if new.max_tokens < 1:
        raise BadRequest(f"max_tokens is {new.max_tokens}; ask for at least 1")
    most = manager.most_encoder_tokens
    if not 0 <= new.encoder_tokens <= most:
        raise BadRequest(
            f"the request has {new.encoder_tokens} tokens of an encoder; this instance's model takes 0 to {most}"
        )
    if config.encoder is not None and new.encoder_tokens > config.encoder.step_embeddings:
        raise BadRequest(
            f"the request has {new.encoder_tokens} tokens of an encoder, which are made in one step; this instance's "
            f"encoder makes {config.encoder.step_embeddings} at most"
        )
    _check_items(new, config)
    usable = config.num_blocks - 1
    needed = manager.blocks_for(length + 1, new.encoder_tokens)
    if needed > usable:
        raise DoesNotFit(
            f"the prompt needs {needed} blocks of {config.block_size} tokens; the whole pool has {usable}. "
            "Shorten the prompt or give the instance more KV memory (--kv-cache-memory-bytes)"
        )
    if (new.source is not None or new.awaited is not None or new.produce) and manager.most_encoder_tokens:
        raise BadRequest(
            "this instance's model attends to what an encoder put out, which is not transferred between instances. "
            "Send the request without kv_transfer_params"
        )
    source = new.source
    if source is None or source.expires_ns is not None:  # of a kept turn what does not fit is not used
        return
    if unlike_blocks(manager, source.grant.block_size) is None:  # else it is not used either: no fault of who asks
        check_source(new, source, config, manager)


def _check_items(new: NewRequest, config: EngineConfig) -> None:
    """Items stand one behind the other inside the prompt; an encoder here must be able to do each of them."""
    limits, end = config.encoder, 0
    for number, item in enumerate(new.items):
        stop = item.offset + item.length
        if not end <= item.offset < stop <= len(new.prompt):
            raise BadRequest(
                f"item {number} stands for tokens {item.offset} to {stop} of a prompt of {len(new.prompt)}, behind one "
                f"that ends at {end}; items stand in order and do not overlap"
            )
        end, spans = stop, item.embedded or ()
        if any(not 0 <= begin <= close <= item.length for begin, close in spans):
            raise BadRequest(f"item {number} has embeddings outside its {item.length} tokens")
        if limits is None:
            continue
        most = min(limits.step_embeddings, limits.cache_embeddings)
        if item.embeddings > most:
            raise BadRequest(
                f"item {number} has {item.embeddings} embeddings; this instance's encoder makes {most} at most"
            )
        if limits.whole_items and item.length > config.max_row_tokens:
            raise BadRequest(
                f"item {number} stands for {item.length} tokens, which must be computed in one step of at most "
                f"{config.max_row_tokens}"
            )
        needed = item.embeddings + sum(_held_until(new.items, number, config.prefill_lookahead_tokens).values())
        if needed > limits.cache_embeddings:
            raise BadRequest(
                f"item {number} is needed before the drafter is through with those right in front of it; together they "
                f"have {needed} embeddings, and this instance's encoder keeps {limits.cache_embeddings} at a time. Put "
                f"{2 * config.prefill_lookahead_tokens} tokens between items, or send smaller ones"
            )


def _held_until(items: Sequence[MultimodalItem], number: int, lookahead: int) -> dict[str, int]:
    """Embeddings by name of what else is held when item ``number`` is needed at the latest.

    Without it no chunk ends behind the token ``lookahead`` in front of it; an item is held until a chunk has ended as
    many tokens behind it.
    """
    held: dict[str, int] = {}
    for item in reversed(items[:number]):
        if item.offset + item.length <= items[number].offset - 2 * lookahead:
            break
        held[item.identifier] = item.embeddings
    held.pop(items[number].identifier, None)
    return held


def check_source(new: NewRequest, source: RemoteSource, config: EngineConfig, manager: KVCacheManager) -> None:
    """Raises `BadRequest` when the blocks that ``source`` grants are not those of a prompt such as ``new`` has.

    What was kept of the turn before may be longer than the prompt: a part of it is used then.
    """
    grant, most = source.grant, len(new.prompt) - manager.leaves_last_token
    if source.expires_ns is not None:
        most = max(most, grant.num_tokens)
    unlike = unlike_blocks(manager, grant.block_size)
    if unlike is not None:
        raise BadRequest(f"the KV offered lies in {unlike}")
    counts, expected = named_blocks(grant), granted_blocks(manager, grant)
    if not 1 <= grant.num_tokens <= most or counts != expected or len(grant.block_ids) != sum(expected):
        sizes = _slashed(group.block_size * grant.block_size // manager.paged_block_size for group in config.groups)
        raise BadRequest(
            f"kv_transfer_params name {grant.num_tokens} tokens in {_slashed(counts)} blocks for a prompt of "
            f"{len(new.prompt)} tokens; blocks hold {sizes} tokens, so {_slashed(expected)} blocks and at most "
            f"{most} tokens are expected. Pass the prefill instance's answer on unchanged"
        )
    ids, units = grant.block_ids, max(1, grant.block_size // manager.paged_block_size)
    if not 0 <= min(ids, default=0) <= max(ids, default=0) < (1 << 31) // units:
        raise BadRequest("kv_transfer_params name blocks that no pool has; pass the prefill instance's answer on")


def _slashed(counts: Iterable[int]) -> str:
    return "/".join(str(count) for count in counts)
