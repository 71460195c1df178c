from __future__ import annotations

import typer

from collegium.cli import app
from collegium.commands import options
from collegium.commands.inspect import ELSEWHERE
from collegium.experts import KERNELS
from collegium.formats import FORMATS
from collegium.ops.quantize import ACTIVATION_FORMATS

# Every command with its arguments (upper case) and options. Changing one is a change users see: CHANGELOG.md.
COMMANDS = {
    "demo": {"--model", "--device", "--tokens", "--download", "--json"},
    "generate": {
        "MODEL",
        "--prompt",
        "--tokens",
        "--temperature",
        "--seed",
        "--penalty",
        "--adapter",
        "--format",
        "--kernel",
        "--activations",
        "--unequal-scales",
        "--dummy",
        "--gpu-memory",
        "--device",
        "--download",
        "--json",
    },
    "inspect": {"MODEL", "--deep", "--no-deep", "--device", "--download", "--json"},
    "bench": {
        "WHAT",
        "--format",
        "--tokens",
        "--routing",
        "--device",
        "--ceilings",
        "--plot",
        "--download",
        "--json",
    },
    "bench-model": {"WHAT", "--format", "--batches", "--layers", "--parallel", "--device", "--download", "--json"},
    "tune": {"WHAT", "--format", "--tokens", "--candidates", "--device", "--download", "--json"},
    "quantize": {"MODEL", "--to", "--out", "--download", "--json"},
    "calibrate": {"MODEL", "--text", "--out", "--tokens", "--steps", "--device", "--download", "--json"},
    "verify": {
        "MODEL",
        "--experts",
        "--all",
        "--device",
        "--kernel",
        "--activations",
        "--unequal-scales",
        "--format",
        "--download",
        "--json",
    },
    "balance record": {"MODEL", "--out", "--text", "--tokens", "--steps", "--device", "--download", "--json"},
    "balance simulate": {"TRACE", "--ranks", "--replicas", "--policy", "--hosts", "--picture", "--json"},
    "balance heatmap": {"TRACE", "--out", "--json"},
    "plan": {
        "MODEL",
        "--device",
        "--kernel",
        "--activations",
        "--format",
        "--max-tokens",
        "--gpu-memory",
        "--trace",
        "--download",
        "--json",
    },
}


def found() -> dict[str, set[str]]:
    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for group in [name for name, command in commands.items() if hasattr(command, "commands")]:
        commands |= {f"{group} {name}": command for name, command in commands.pop(group).commands.items()}
    return {
        name: {
            spelling if spelling.startswith("-") else spelling.upper()
            for parameter in command.params
            for spelling in (*parameter.opts, *parameter.secondary_opts)
        }
        - {"--help"}
        for name, command in commands.items()
    }


def test_help_names_every_value() -> None:
    def listed(text: str) -> list[str]:
        return text.replace(" or ", ", ").split(", ")

    assert listed(options.FORMATS) == [form.name for form in FORMATS if not form.read_only]
    assert listed(options.KERNELS) == [kernel.name for kernel in KERNELS]
    assert listed(options.ACTIVATIONS) == [form.name for form in ACTIVATION_FORMATS]


def test_help_names_every_machine_elsewhere() -> None:
    said = str(typer.main.get_command(app).commands["plan"].help)  # type: ignore[attr-defined]
    assert [name for name in ELSEWHERE if name not in said] == []


def test_options_are_frozen() -> None:
    assert found() == COMMANDS


def test_every_command_speaks_json() -> None:
    assert all("--json" in options for options in found().values())
