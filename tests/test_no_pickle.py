"""Nothing in the package can run code out of data: the source is walked for everything that would."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pdkv

ROOT = Path(pdkv.__file__).parent
FORBIDDEN_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "torch.load", "torch.hub.load", "torch.jit.load",
    "pandas.read_pickle",
}  # fmt: skip
FORBIDDEN_NAMES = {  # of any object: pickled descriptors in NIXL's API, objects over ZMQ and torch.distributed
    "get_serialized_descs", "deserialize_descs", "recv_pyobj", "send_pyobj",
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
FORBIDDEN_TRUE = {"allow_pickle", "trust_remote_code", "shell"}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression of names."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def offences(source: str) -> Iterator[str]:
    """What of ``source`` could run code out of data."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = {alias.name.partition(".")[0] for alias in names}
                yield from (f"import {module}" for module in modules & FORBIDDEN_MODULES)
            case ast.ImportFrom(module=module) if module and module.partition(".")[0] in FORBIDDEN_MODULES:
                yield f"from {module}"
            case ast.Call(func=function, keywords=keywords):
                if dotted(function) in FORBIDDEN_CALLS:
                    yield f"{dotted(function)}()"
                for keyword in keywords:
                    off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                    if keyword.arg in FORBIDDEN_TRUE and not off:
                        yield f"{keyword.arg}="
            case ast.Attribute(attr=name) if name in FORBIDDEN_NAMES:
                yield name


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_can_run_code_out_of_data(path: Path) -> None:
    assert list(offences(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import a, marshal as m",
        "import torch\ntorch.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "agent.deserialize_descs(data)",
        "socket.recv_pyobj()",
        "yaml.load(text, Loader=yaml.Loader)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "def f():\n    return eval(text)",
    ],
)
def test_the_walk_finds_what_it_looks_for(source: str) -> None:
    assert list(offences(source))


def test_what_is_allowed_is_not_found() -> None:
    assert not list(offences("np.load(path, allow_pickle=False)\nmodel.eval()\nre.compile('x')\nyaml.safe_load(text)"))
