"""One prefill or decode instance as a process: the engine on its own thread, uvicorn on the main one.

``python -m pdkv.serve.instance_main TASK`` is how the supervisor starts it; `run` is `pdkv serve prefill|decode`.
"""

from __future__ import annotations

import gc
import logging
import socket
import sys
from typing import Any

import msgspec

from pdkv.serve.child import ChildTask, Reporter, run_child
from pdkv.serve.options import InstanceOptions
from pdkv.serve.web import bind, serve_app, url_of


def run(options: InstanceOptions) -> int:
    """Start an instance and serve until SIGINT or SIGTERM; returns the exit code (1 when the engine failed).

    Raises `PdkvError` for what a person can change: unknown model, port in use, too little memory.
    """
    return serve_instance(options, Reporter(None))


def serve_instance(options: InstanceOptions, reporter: Reporter, sock: socket.socket | None = None) -> int:
    """`run`, reporting to ``reporter``; ``sock`` is bound already when a supervisor chose the port."""
    logging.basicConfig(
        level=logging.DEBUG if options.debug else logging.INFO,
        format=f"%(asctime)s %(levelname)s {options.role} %(name)s: %(message)s",
    )
    for noisy in ("httpx", "httpcore", "asyncio", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    sock = sock or bind(options.host, options.port)
    reporter.progress("importing torch and transformers ...")
    from pdkv.runtime.precheck import check

    files = check(options)  # before torch is imported
    from pdkv.runtime.boot import start_instance
    from pdkv.serve.api import create_app
    from pdkv.serve.queue_limits import QueueLimits
    from pdkv.serve.telemetry import Telemetry

    name = options.served_model_name or files.name
    telemetry = Telemetry(name)

    def say(line: str) -> None:
        logging.getLogger("pdkv").info("%s", line)
        reporter.progress(line)

    instance = start_instance(options, on_events=telemetry.on_events, say=say)
    try:
        limits = QueueLimits(options.max_num_queued_reqs, options.max_num_queued_tokens)
        app = create_app(instance, telemetry, served_model_name=name, limits=limits)
        facts = ready_facts(instance.info, url_of(sock))
        # What was loaded stays until the end: no garbage collection need walk it, in serving or on the way out.
        gc.collect()
        gc.freeze()
        return serve_app(
            app,
            sock,
            on_ready=lambda: reporter.ready(ready_line(facts), facts),
            broken=lambda: instance.failed is not None,
        )
    finally:
        instance.close()


def ready_facts(info: Any, url: str) -> dict[str, Any]:
    """The facts of the ready line, as the supervisor reads them."""
    return {
        "role": info.role,
        "url": url,
        "engine_id": info.engine_id,
        "model": info.model_name,
        "transport": info.transport,
        "without_nixl": info.without_nixl,
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "bytes_per_block": info.bytes_per_block,
        "tensor_parallel_size": info.tensor_parallel_size,
        "max_model_len": info.max_model_len,
        "side_channel": f"{info.side_channel_host}:{info.side_channel_port}",
    }


def ready_line(facts: dict[str, Any]) -> str:
    """One line for people and scripts."""
    ranks = facts["tensor_parallel_size"]
    return (
        f"pdkv {facts['role']} ready: {facts['url']} model={facts['model']} transport={facts['transport']} "
        f"blocks={facts['num_blocks']}{f' ranks={ranks}' if ranks > 1 else ''} side_channel={facts['side_channel']}"
    )


if __name__ == "__main__":
    sys.exit(run_child(msgspec.json.decode(sys.argv[1], type=ChildTask[InstanceOptions]), serve_instance))
