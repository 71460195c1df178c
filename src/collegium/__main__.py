"""``python -m collegium``: the command, where its script is not in the search path."""

from .cli import run_process

__all__: list[str] = []

if __name__ == "__main__":
    run_process()
