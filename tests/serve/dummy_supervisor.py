"""`supervisor.run` as a process of its own, over dummy children: argv has the behaviours of prefill, decode, router."""

from __future__ import annotations

import json
import sys
from typing import Any

from pdkv.serve import supervisor
from pdkv.serve.options import InstanceOptions, RouterOptions, ServeOptions
from pdkv.serve.progress import Progress
from pdkv.serve.web import bind


class DummyCluster(supervisor.Cluster):
    def prepare(self) -> None:
        self._public = bind(self.options.host, self.options.port)

    def start(self, progress: Progress | None = None) -> str:
        assert self._public is not None
        names = ("prefill", "decode", "router")
        sockets = (bind("127.0.0.1", 0), bind("127.0.0.1", 0), self._public)
        self._public = None
        self.launch([part(name, how, sock) for name, how, sock in zip(names, sys.argv[1:4], sockets, strict=True)])
        self.await_ready(progress or Progress(), 20)
        sys.stdout.write(json.dumps(self.facts) + "\n")
        return self.ready_line()


def part(name: str, behaviour: str, sock: Any) -> supervisor.Part:
    options = RouterOptions(prefill=(f"http://{behaviour}:1",), decode=("http://d:1",))
    return supervisor.Part(name, "tests.serve.dummy_child", options, sock)


def options(**more: Any) -> ServeOptions:
    return ServeOptions(
        prefill=InstanceOptions(role="prefill", model="m"),
        decode=InstanceOptions(role="decode", model="m"),
        **{"port": 0, "stop_grace_s": 1.0, **more},
    )


if __name__ == "__main__":
    supervisor.Cluster = DummyCluster  # type: ignore[misc]
    sys.exit(supervisor.run(options()))
