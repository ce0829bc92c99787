"""``pdkv models``: which models the catalogue knows, and where their configs were read."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)


@app.command()
def models(
    text: Annotated[str, typer.Argument(metavar="[TEXT]", help="Only those with TEXT in a name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Names, aliases, sources and configs as JSON.")] = False,
) -> None:
    """List the models that `pdkv plan NAME` knows without a download. A name's last part is enough, in any case."""
    import msgspec

    from pdkv.models.catalog import catalog

    wanted = text.lower()
    found = [model for model in catalog().values() if any(wanted in name.lower() for name in model.names)]
    if as_json:
        fields = [
            {"name": known.name, "aliases": known.aliases, "source": known.source, "config": known.config}
            for known in found
        ]
        print(msgspec.json.format(msgspec.json.encode(fields), indent=2).decode())
        return
    for known in found:
        print(" = ".join(known.names))
    print(f"{len(found)} of {len(catalog())} models" if text else f"{len(found)} models")
