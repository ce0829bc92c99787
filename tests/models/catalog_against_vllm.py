"""Every catalogued config as vLLM reads it: layers, heads, head size, context, and whether its attention is MLA.

Not part of the test suite, because it needs vLLM 0.32 (its CPU build will do) in its own environment:

    PYTHONPATH=src PATH/TO/vllm/bin/python tests/models/catalog_against_vllm.py [TEXT]

Prints one line for each model that differs or that vLLM cannot read, then ``N equal, M not read, D different``; exits
1 when one differs. A config that vLLM only reads with code from the hub is not read, and what a spec does not say (the
heads of a model with several kinds of attention) is not compared.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from vllm.config.model import _get_and_verify_max_len
from vllm.transformers_utils.config import get_config, get_hf_text_config
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)

from pdkv.models.catalog import CatalogModel, catalog
from pdkv.models.families import spec_from_config
from pdkv.models.spec import LayerKind, ModelSpec


def of_vllm(known: CatalogModel, folder: Path) -> dict[str, Any]:
    """What vLLM's ModelConfig would take from the model's config."""
    # How weights are stored is checked against the platform, which has nothing to do with the shape.
    config = {key: value for key, value in known.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    whole = get_config(folder, trust_remote_code=False)
    text = get_hf_text_config(whole)
    shape = MODEL_ARCH_CONFIG_CONVERTORS.get(whole.model_type, ModelArchConfigConvertorBase)(whole, text).convert()
    return {
        "context": _get_and_verify_max_len(text, shape, None, None, False, None),
        "layers": shape.total_num_hidden_layers,
        "kv_heads": 1 if shape.is_deepseek_mla else shape.total_num_kv_heads,
        "head_size": shape.head_size,
        "mla": shape.is_deepseek_mla,
    }


def ours(spec: ModelSpec) -> dict[str, Any]:
    """The same facts of a ModelSpec, less those that it does not have."""
    attending = [layer for layer in spec.layers if layer.kind is not LayerKind.MAMBA and layer.part == "attn"]
    latent = any(layer.kind in (LayerKind.MLA, LayerKind.SLIDING_WINDOW_MLA) for layer in attending)
    facts = {"context": spec.served_model_len or spec.max_model_len, "layers": spec.decoder_layers, "mla": latent}
    if latent:
        facts |= {"kv_heads": 1, "head_size": attending[0].head_dim}
    elif spec.heads is not None:
        facts |= {"kv_heads": spec.heads[0], "head_size": spec.heads[1]}
    return facts


def main(text: str) -> int:
    """Compare all models with ``text`` in their names; returns the exit status."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    equal, unread, different = 0, 0, 0
    for known in catalog().values():
        if text.lower() not in known.name.lower():
            continue
        try:
            found = ours(spec_from_config(known.config, name=known.name))
            with tempfile.TemporaryDirectory() as folder:
                theirs = of_vllm(known, Path(folder))
        except Exception as reason:  # whatever vLLM or transformers raises is the reason to print
            unread += 1
            print(f"{known.name}: not read ({type(reason).__name__}: {str(reason).splitlines()[0][:150]})", flush=True)
            continue
        wrong = {key: (value, theirs[key]) for key, value in found.items() if theirs[key] != value}
        different += bool(wrong)
        equal += not wrong
        if wrong:
            print(f"{known.name}: ours, vLLM's: {wrong}", flush=True)
    print(f"{equal} equal, {unread} not read, {different} different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
