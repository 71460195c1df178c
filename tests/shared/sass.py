"""Machine code of Hopper as text: which registers asynchronous products use, and what writes to them too early."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import triton

__all__ = ["Instruction", "early_accesses", "early_writes", "instructions", "product_loops"]

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
_PRODUCT = re.compile(r"R(\d+), (?:R(\d+)|gdesc)")
# Instructions whose first operand is not a register that they write.
_NO_RESULT = (
    "ST", "BRA", "BAR", "SYNCS", "WARPGROUP", "RED", "EXIT", "UBLK", "UTMA", "CCTL", "FENCE", "NOP", "BSYNC", "BSSY",
    "R2UR", "ISETP", "FSETP", "PLOP3", "MEMBAR", "S2UR", "WARPSYNC", "ELECT", "U",
)  # fmt: skip
# Loads, stores, atomic operations, and copies by the tensor memory accelerator.
_GLOBAL_ACCESSES = {"LD", "LDG", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "UTMALDG", "UTMASTG", "UTMAPF", "UBLKCP"}


class Instruction(NamedTuple):
    """An instruction at an address: its name with modifiers, and its operands."""

    address: int
    name: str
    operands: str

    @property
    def is_product(self) -> bool:
        """Whether it starts a product of the tensor core."""
        return self.name.startswith(("QGMMA", "HGMMA"))


def instructions(cubin: Path) -> list[Instruction]:
    """Return the instructions of a file of machine code, which has one kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    matches = filter(None, map(_LINE.match, text.splitlines()))
    return [Instruction(int(found[1], 16), found[2], found[3]) for found in matches]


def product_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Return the innermost loops that multiply."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    spans: list[tuple[int, int]] = []
    for end, instruction in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)$", instruction.operands) if instruction.name == "BRA" else None
        start = index.get(int(target[1], 16), end + 1) if target else end + 1
        if start < end and any(inside.is_product for inside in code[start:end]):
            spans.append((start, end))
    inner = [a for a in spans if not any(b != a and b[0] >= a[0] and b[1] <= a[1] for b in spans)]
    return [code[start : end + 1] for start, end in inner]


def early_writes(loop: list[Instruction]) -> list[Instruction]:
    """Return what writes to a register that a running product reads or writes, in two passes of a loop."""
    running: list[set[int]] = []  # of each committed group of products that was not waited for
    group: set[int] = set()
    found: list[Instruction] = []
    for instruction in loop * 2:
        if instruction.is_product:
            group |= _registers_of_product(instruction)
            if "gsb0" in instruction.operands:
                running.append(group)
                group = set()
        elif instruction.name.startswith("WARPGROUP.DEPBAR"):
            left = int(instruction.operands.rsplit("0x", 1)[1], 16)
            running = running[len(running) - left :] if left else []
        elif _registers_written(instruction) & group.union(*running):
            found.append(instruction)
    return found


def early_accesses(code: list[Instruction]) -> list[Instruction]:
    """Return what accesses global memory before the kernel has waited for those before it in the stream."""
    names = [instruction.name.split(".")[0] for instruction in code]
    end = names.index("ACQBULK") if "ACQBULK" in names else len(names)
    return [code[i] for i in range(end) if names[i] in _GLOBAL_ACCESSES]


def _registers_of_product(instruction: Instruction) -> set[int]:
    """Return its sums, and its first operand where that is in registers."""
    registers = _PRODUCT.match(instruction.operands)
    width = re.search(r"64x(\d+)x", instruction.name)
    assert registers is not None, instruction
    assert width is not None, instruction
    used = set(range(int(registers[1]), int(registers[1]) + int(width[1]) // 2))
    if registers[2] is not None:
        used |= set(range(int(registers[2]), int(registers[2]) + 4))
    return used


def _registers_written(instruction: Instruction) -> set[int]:
    if instruction.name.startswith(_NO_RESULT):
        return set()
    result = re.match(r"(?:U?P\w+, )?R(\d+)", instruction.operands)
    if result is None:
        return set()
    count = 1
    if ".128" in instruction.name:
        count = 4
    elif ".64" in instruction.name or instruction.name.startswith("IMAD.WIDE") or instruction.name == "CS2R":
        count = 2
    return set(range(int(result[1]), int(result[1]) + count))
