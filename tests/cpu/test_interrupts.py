from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collegium import cli
from commands import command

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
WORDS = {
    "generate": ("fables-16m", "--tokens", "5000"),
    "inspect": ("fables-16m",),
    "verify": ("fables-16m", "--all"),
    "plan": ("fables-16m",),
}


def interrupted_after(seconds: float, *words: str) -> tuple[int, str, str]:
    running = subprocess.Popen(
        [sys.executable, "-m", "collegium", *words, "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(seconds)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=120)
    return running.returncode, out, err


@pytest.mark.parametrize(("name", "seconds"), [("generate", 1.0), ("generate", 4.0), ("verify", 1.0)])
def test_an_interrupt_is_one_line(name: str, seconds: float) -> None:
    code, out, err = interrupted_after(seconds, name, *WORDS[name])
    # Python ends itself by the signal if the interrupt met code compiled from a string (a dataclass being defined);
    # shells show 130 for both.
    assert code in (130, -signal.SIGINT)
    assert (out, err.splitlines()) == ("", ["Interrupted: stopped by Ctrl-C"])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RecursionError("half an import"), ImportError("half")])
@pytest.mark.parametrize("name", list(WORDS))
def test_every_command_stops(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """An interrupt inside a command, and whatever the unwinding raises in its place."""

    def stop(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None

    monkeypatch.setattr(cli, "find_model", stop)
    before = signal.getsignal(signal.SIGINT)
    try:
        code, out, err = command(name, *WORDS[name])
        assert (code, out, err) == (130, "", "Interrupted: stopped by Ctrl-C")
        code, out, _ = command(name, *WORDS[name], "--json")
        assert (code, json.loads(out)["error"]["kind"]) == (130, "Interrupted")
    finally:
        signal.signal(signal.SIGINT, before)


def test_full_disk_keeps_error_class() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    for words, kind in ((("inspect", "no/such/model"), "CheckpointError"), (("plan", str(SHIPPED)), "OSError")):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "collegium", *words, "--json"],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 1
        assert done.stderr.startswith(f"{kind}: ")
        assert len(done.stderr.splitlines()) == 1
