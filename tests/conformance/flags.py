"""Compares plan/vllm_flags.tsv with the parser of an installed vLLM: run it with that vLLM's Python.

    PYTHONPATH=src /path/to/vllm-env/bin/python tests/conformance/flags.py

Prints every difference, then ``N passed, M failed``; the exit status is 1 when there is one.
"""

from __future__ import annotations

import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from pdkv.plan.vllm_flags import flags

_VALUES = {None: "1", 0: "0", "?": "?", "+": "+"}


def main() -> int:
    """Every flag of the parser: its name, all spellings, and how many values it takes."""
    theirs = {}
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        if action.option_strings and "--help" not in action.option_strings:
            name = next(option for option in action.option_strings if option.startswith("--"))
            theirs[name] = (set(action.option_strings), _VALUES[action.nargs])
    ours = {flag.name: ({flag.name, *flag.spellings}, flag.values) for flag in flags().values() if not flag.removed}
    wrong = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    for name in wrong:
        print(f"{name}: vLLM {theirs.get(name)}, here {ours.get(name)}")
    print(f"{len({*theirs, *ours}) - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
