"""``python -m pdkv``: the same as the ``pdkv`` command."""

from pdkv.cli.main import run

if __name__ == "__main__":
    run()
