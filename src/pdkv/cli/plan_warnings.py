"""Warnings of a plan for a person: what vLLM would refuse stands above the numbers, the rest below them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from pdkv.plan.model_length import is_beyond_model_length


def print_refusals(console: Console, warnings: Iterable[str]) -> None:
    """What vLLM would not start with."""
    for warning in filter(is_beyond_model_length, warnings):
        console.print(f"[bold red]warning[/]: {escape(warning)}", soft_wrap=True)


def print_notes(console: Console, warnings: Iterable[str]) -> None:
    """The other warnings."""
    for warning in warnings:
        if not is_beyond_model_length(warning):
            console.print(f"[yellow]note[/]: {escape(warning)}", soft_wrap=True)
