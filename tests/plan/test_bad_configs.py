"""Configs that are unreadable, contradictory or of the wrong kinds: one error for people, never anything else."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from tests.plan.models import CONFIGS, DENSE, STATES, WINDOWED

from pdkv.errors import ConfigError, PdkvError
from pdkv.plan.options import PlanOptions
from pdkv.plan.planner import make_plan
from pdkv.source import find_spec
from pdkv.units import GIB

WRONG: list[Any] = [
    None, 0, -1, 1, 3, 1 << 40, 1.5, math.nan, math.inf, "x", "", [], [1], [None], {}, {"a": 1}, True,
    ["full_attention"], {"rope_type": "linear", "factor": "x"},
]  # fmt: skip


def plan(tmp_path: Path, config: dict[str, Any], **settings: Any) -> None:
    path = tmp_path / "acme.json"
    path.write_text(json.dumps(config))
    make_plan(find_spec(str(path)), PlanOptions(**settings))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (DENSE | {"num_hidden_layers": -4}, "num_hidden_layers is -4"),
        (DENSE | {"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        (DENSE | {"num_attention_heads": 0}, "num_attention_heads is 0"),
        (DENSE | {"max_position_embeddings": None}, "no context length"),
        (DENSE | {"hidden_size": None}, "acme"),
        (WINDOWED | {"layer_types": ["full_attention"] * 3}, "layer_types"),
        (WINDOWED | {"layer_types": ["wishful_attention"] * 16}, "wishful_attention"),
        (WINDOWED | {"layer_types": 7}, "layer_types|shape"),
        (STATES | {"linear_num_value_heads": 0}, "recurrent|linear_num_value_heads"),
    ],
)
def test_contradictions_name_the_field(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(tmp_path, config, kv_cache_memory_bytes=GIB)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_no_value_of_a_field_breaks_it(tmp_path: Path, name: str) -> None:
    """Each field in turn, and pairs at random, replaced by what it should not be."""
    rng = random.Random(name)
    whole = CONFIGS[name] | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    cases = [{field: value} for field in whole for value in WRONG]
    fields = list(whole)
    cases += [{rng.choice(fields): rng.choice(WRONG), rng.choice(fields): rng.choice(WRONG)} for _ in range(60)]
    refused = 0
    for changes in cases[rng.randrange(3) :: 3]:
        try:
            plan(tmp_path, whole | changes, gpu="h100", tensor_parallel_size=rng.choice((1, 2, 8)))
        except PdkvError as error:
            refused += 1
            assert str(error)
    assert 0 < refused < len(cases)


@pytest.mark.parametrize("ref", ["x" * 5000, "~nobody-of-that-name/config.json", "a\0b", ""])
def test_paths_that_are_none(ref: str) -> None:
    with pytest.raises(ConfigError, match="not a name in the catalogue"):
        find_spec(ref)
