"""A child for the supervisor's tests: the host name of its first prefill URL says how it behaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import msgspec

from pdkv.errors import ConfigError
from pdkv.serve.child import ChildTask, Reporter, run_child
from pdkv.serve.options import RouterOptions


def behave(options: RouterOptions, reporter: Reporter, sock: socket.socket) -> int:
    behaviour = urlsplit(options.prefill[0]).hostname
    port = sock.getsockname()[1]
    print("first line of", behaviour, flush=True)
    reporter.progress("working")
    if behaviour == "refuses":
        raise ConfigError("this model is unknown; use another")
    if behaviour == "dies":
        print("a traceback, say", flush=True)
        os._exit(3)
    if behaviour == "hangs":
        time.sleep(600)
    facts = {"pid": os.getpid(), "url": f"http://127.0.0.1:{port}", "model": "m", "transport": "shm", "num_blocks": 7}
    facts["tensor_parallel_size"] = 1
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        facts["grandchild"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
    reporter.ready("ready", facts)
    if behaviour == "dies-later":
        time.sleep(0.3)
        print("out of memory, say", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(run_child(msgspec.json.decode(sys.argv[1], type=ChildTask[RouterOptions]), behave))
