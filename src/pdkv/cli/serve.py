"""``pdkv serve MODEL`` and ``pdkv serve prefill|decode|router``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from pdkv.cli.engine_extra import engine_module
from pdkv.cli.instance_options import build_instance, with_instance_options

if TYPE_CHECKING:
    from pdkv.core.transfer.messages import TransferMode
    from pdkv.serve.options import PrefillFallback  # other names are refused by the options themselves

_PAIR = "(prefill, decode and router)"


class _ServeGroup(TyperGroup):
    """Anything that is not the name of a part is MODEL (or an option) of the command that starts all parts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands:
            args = [_PAIR, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == _PAIR else name), command, rest  # so that its usage line reads `pdkv serve MODEL`


app = typer.Typer(
    cls=_ServeGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Serve a model: `pdkv serve MODEL` starts a prefill instance, a decode instance and the router.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="smollm2, a model directory (safetensors), a .gguf file, or a hub id.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="HTTP port; 0: any free one.")]
Fallback = Annotated[
    str, typer.Option(help="When no prefill instance answers: local (decode computes the prompt) or fail (503).")
]
Mode = Annotated[
    str,
    typer.Option(
        help="pull: D is asked when P has finished. push: both at once; D holds no memory while it waits. "
        "write: as push, but D's blocks are held from the start and P writes into them."
    ),
]
InstanceTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="Give an instance up that answers nothing for so long, not even its health check."
    ),
]


def _run(module: str, options: Any) -> None:
    """Serve, and exit with what that returns; Ctrl-C is a request to stop like any other, from the first moment on."""
    try:
        code = engine_module(module).run(options)
    except KeyboardInterrupt:
        print("\npdkv: stopping", file=sys.stderr)
        code = 0
    raise typer.Exit(code)


@app.command(_PAIR, hidden=True)
@with_instance_options
def pair(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    prefill_fallback: Fallback = "local",
    transfer_mode: Mode = "pull",
    instance_timeout: InstanceTimeout = 30.0,
    log_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Keep the instances' logs here.")] = None,
    prefill_tensor_parallel_size: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks of the prefill instance, if not --tensor-parallel-size.")
    ] = None,
    decode_tensor_parallel_size: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks of the decode instance, if not --tensor-parallel-size.")
    ] = None,
    **options: Any,
) -> None:
    """Start a prefill instance, a decode instance and the router; Ctrl-C stops all.

    To start them one by one, on one host or several: `pdkv serve prefill|decode|router --help`.
    """
    from pdkv.serve.options import ServeOptions

    # Two listeners on one host: consecutive ports, or any free ones.
    side_channel = options["side_channel_port"]
    ranks = options["tensor_parallel_size"]
    of_prefill = {
        **options,
        "tensor_parallel_size": ranks if prefill_tensor_parallel_size is None else prefill_tensor_parallel_size,
    }
    of_decode = {
        **options,
        "side_channel_port": side_channel + 1 if side_channel else 0,
        "tensor_parallel_size": ranks if decode_tensor_parallel_size is None else decode_tensor_parallel_size,
    }
    serve_options = ServeOptions(
        prefill=build_instance("prefill", model, host="127.0.0.1", port=0, options=of_prefill),
        decode=build_instance("decode", model, host="127.0.0.1", port=0, options=of_decode),
        host=host,
        port=port,
        prefill_fallback=cast("PrefillFallback", prefill_fallback),
        transfer_mode=cast("TransferMode", transfer_mode),
        instance_timeout_s=instance_timeout,
        log_dir=log_dir,
    )
    _run("supervisor", serve_options)


@app.command("prefill")
@with_instance_options
def prefill(model: Model, host: Host = "127.0.0.1", port: Port = 8100, **options: Any) -> None:
    """Start one prefill instance: it computes prompts' KV and keeps it under leases for decode instances."""
    instance_options = build_instance("prefill", model, host=host, port=port, options=options)
    _run("instance_main", instance_options)


@app.command("decode")
@with_instance_options
def decode(model: Model, host: Host = "127.0.0.1", port: Port = 8200, **options: Any) -> None:
    """Start one decode instance: it reads prompts' KV from prefill instances and writes the answers."""
    instance_options = build_instance("decode", model, host=host, port=port, options=options)
    _run("instance_main", instance_options)


@app.command("router")
def router(
    prefill: Annotated[list[str], typer.Option(metavar="URL", help="A prefill instance; may be repeated.")],
    decode: Annotated[list[str], typer.Option(metavar="URL", help="A decode instance; may be repeated.")],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    prefill_fallback: Fallback = "local",
    transfer_mode: Mode = "pull",
    instance_timeout: InstanceTimeout = 30.0,
    bidirectional_kv_xfer: Annotated[
        bool,
        typer.Option(
            "--bidirectional-kv-xfer",
            help="Remember what D kept of a conversation, for its next turn's P. All must be started with it.",
        ),
    ] = False,
    decoder_kv_blocks_ttl: Annotated[
        int, typer.Option(metavar="SECONDS", help="For how long; as given to the decode instances.")
    ] = 480,
) -> None:
    """Start the router: the OpenAI API in front of prefill and decode instances."""
    from pdkv.serve.options import RouterOptions

    options = RouterOptions(
        prefill=tuple(prefill),
        decode=tuple(decode),
        host=host,
        port=port,
        prefill_fallback=cast("PrefillFallback", prefill_fallback),
        transfer_mode=cast("TransferMode", transfer_mode),
        instance_timeout_s=instance_timeout,
        bidirectional_kv_xfer=bidirectional_kv_xfer,
        decoder_kv_blocks_ttl_s=decoder_kv_blocks_ttl,
    )
    _run("router", options)
