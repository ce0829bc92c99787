"""NIXL's notifications are authenticated by nobody, so nothing is decided by them: their queue is emptied, no more."""

from __future__ import annotations

import ast
from pathlib import Path

import pdkv

ROOT = Path(pdkv.__file__).parent
DECIDING = {
    "send_notif",
    "send_notification",
    "check_remote_xfer_done",
    "update_notifs",
    "notif_msg",
    "query_xfer_notif",
}


def test_nothing_sends_or_reads_a_notification() -> None:
    emptied = 0
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                assert node.attr not in DECIDING, f"{path}:{node.lineno}: {node.attr}"
            if isinstance(node, ast.keyword):
                assert node.arg not in DECIDING, f"{path}:{node.lineno}: {node.arg}="
        thrown_away = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        for call in calls:
            if call.func.attr == "get_new_notifs":
                assert call in thrown_away, f"{path}:{call.lineno}: a notification is looked at"
                emptied += 1
    assert emptied == 1
