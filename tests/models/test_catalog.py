"""Every model of the catalogue is sized, or refused with a reason; names lead to it however they are written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pdkv.errors import ConfigError, PdkvError, UnsupportedModel
from pdkv.layout.build import KvSettings, stage_caches
from pdkv.models.catalog import CatalogModel, catalog, find_model, similar_names
from pdkv.models.families import spec_from_config
from pdkv.models.weights import count_weights
from pdkv.source import find_spec

MODELS = pytest.mark.parametrize("model", catalog().values(), ids=lambda model: model.name)


@MODELS
def test_every_model_is_sized_or_refused_by_name(model: CatalogModel) -> None:
    assert model.source
    try:
        spec = spec_from_config(model.config, name=model.name)
    except UnsupportedModel as refusal:
        assert str(refusal).startswith(model.name)
        return
    built = stage_caches(spec, KvSettings(model_dtype=spec.dtype or "bfloat16", max_model_len=spec.max_model_len))
    assert built.stages[0]


def test_the_catalogue_is_as_large_as_promised() -> None:
    sized = 0
    for model in catalog().values():
        try:
            sized += bool(spec_from_config(model.config, name=model.name).layers)
        except PdkvError:
            continue
    assert sized >= 120


def test_every_stored_config_of_the_task_is_in_it_whole(shared: Path) -> None:
    """Fields that differ are those that size nothing; a list of names comes back as it was, in any order."""
    for path in sorted((shared / "models").glob("*.json")):
        stored = json.loads(path.read_text())
        known = find_model(path.stem.replace("--", "/", 1))
        assert known is not None, path.stem
        for key in known.config.keys() & stored.keys() - {"quantization_config"}:
            assert _within(known.config[key], stored[key]), f"{path.stem}: {key}"
        ours, theirs = (config.get("quantization_config") for config in (known.config, stored))
        if theirs is not None:
            assert _sorted(ours) == _sorted(theirs), path.stem
            assert spec_from_config(known.config, name="m") == spec_from_config(stored, name="m"), path.stem
        elif ours is not None:
            assert "hf_quant_config.json" in known.source, path.stem  # ModelOpt's file, which lies beside the config


def _within(kept: object, whole: object) -> bool:
    if isinstance(kept, dict) and isinstance(whole, dict):
        return all(_within(value, whole[key]) for key, value in kept.items())
    return kept == whole


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sorted(inner) for key, inner in sorted(value.items())}
    return sorted(set(value)) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value


def test_no_name_means_two_models() -> None:
    names = [name.lower() for model in catalog().values() for name in model.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("written", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "QWEN3-8B"])
def test_a_name_is_found_in_any_case_and_by_its_last_part(written: str) -> None:
    found = find_model(written)
    assert found is not None
    assert found.name == "Qwen/Qwen3-8B"


def test_an_alias_leads_to_its_model() -> None:
    found = find_model("Llama-3.1-8B-Instruct")
    assert found is not None
    assert found is find_model("meta-llama/Meta-Llama-3.1-8B")


def test_a_near_miss_is_suggested_and_never_taken() -> None:
    assert "Qwen/Qwen3-8B" in similar_names("Qwen3-8b-instruc")
    with pytest.raises(ConfigError, match=r"did you mean .*Qwen/Qwen3-8B"):
        find_spec("Qwen3-8bb")
    with pytest.raises(ConfigError, match="no such file or directory either; give a model directory"):
        find_spec("zzzzzzzzzzzz")


# How a name says its size: 8B, 135M, 0.6B, but not A3B (active) or 8x7B.
_SIZE = re.compile(r"(?<![\d.a-z])(\d+(?:\.\d+)?)([bm])(?![a-z])", re.IGNORECASE)
# Names that round by more than a tenth (embeddings not counted, powers of two) or mean active parameters: billions.
_OTHERWISE = {
    "google/gemma-2-2b": 2.61,
    "google/gemma-2b": 2.51,
    "google/gemma-7b": 8.54,
    "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 402,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 109,
}


@MODELS
def test_parameters_agree_with_the_size_in_the_name(model: CatalogModel) -> None:
    said = _SIZE.search(model.name.rsplit("/", 1)[-1])
    try:
        params = count_weights(model.config, spec_from_config(model.config, name=model.name)).params
    except UnsupportedModel as refusal:
        assert str(refusal).startswith(model.name)
        return
    assert params > 0
    if said is not None:
        size = float(said[1]) * (10**9 if said[2].lower() == "b" else 10**6)
        expected, share = (_OTHERWISE[model.name] * 10**9, 0.03) if model.name in _OTHERWISE else (size, 0.11)
        assert abs(params - expected) <= share * expected, f"{params:,}"
