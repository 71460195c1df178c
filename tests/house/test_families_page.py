"""The table of docs/families.md is what the name tables say; a failure prints the rows that are missing."""

from __future__ import annotations

import re

from collegium.models import FAMILIES, PREFIXES, Family, Names
from family_cases import FLOAT32_ON_GPU, NEW_ON_GPU, NOT_WHOLE, TEXT_PARTS
from tracked import ROOT

# GGUF files of which only layers load.
LAYERS_OF_FILES = {
    "gguf:bailingmoe2", "gguf:deepseek2", "gguf:ernie4_5-moe", "gguf:gemma4", "gguf:hunyuan-moe", "gguf:kimi-linear",
    "gguf:lfm2moe", "gguf:llama4", "gguf:nemotron_h_moe", "gguf:qwen35moe", "gguf:qwen3next",
}  # fmt: skip
BY_HAND = {
    "arctic": "arithmetic",
    "step3": "arithmetic",
    "deepseek_v2": "class; VL2 by arithmetic",
    "deepseek_v4": "class; MXFP4 by arithmetic",
    "kimi_linear": "class; Kimi-K3 by arithmetic",
    "minimax": "class; published names by arithmetic",
    "qwen3_moe": "class; Qwen3-Omni by arithmetic",
    "gguf": "files",
    "gguf_gemma4": "files",
    "gguf_gpt_oss": "files",
    "gguf_llama4": "files",
    "gguf_nemotron_h": "files",
    "gguf_qwen2moe": "files",
}
HEAD = ["family", "`model_type`", "experts", "router", "shared expert", "layer", "whole model", "GPU"]


def experts(names: Names) -> str:
    """Return the paths of the experts below a layer, one for all projections."""
    single = [path for path in (names.gate, names.up, names.down) if path is not None]
    stacks = [path for path in (names.stacked.gate_up, names.stacked.up, names.stacked.down) if path is not None]
    paths = [path.removeprefix(names.layer).replace("{expert}", "{e}") for path in single or stacks]
    head = paths[0].rpartition(".")[0]
    return f"`{head}.{{{','.join(path.removeprefix(head + '.') for path in paths)}}}`"


def router(names: Names) -> str:
    found = (names.router_weight, names.router_bias, names.correction_bias, names.router_scale, names.expert_scale)
    paths = [path.removeprefix(names.layer) for path in (*found, names.hash_table) if path is not None]
    return ", ".join(f"`{path}`" for path in paths)


def shared(names: Names) -> str:
    if names.shared is None:
        return "none"
    head, _, tail = names.shared[0].removeprefix(names.layer).rpartition(".")
    return f"`{head or tail}`" + (", gated" if names.shared_gate else "")


def of_types(family: Family, without: set[str]) -> str:
    """Say which model types of a family a column is true of."""
    left = [f"`{name}`" for name in family.model_types if name in without]
    return "yes" if not left else "no" if len(left) == len(family.model_types) else "all but " + ", ".join(left)


def row(family: Family) -> list[str]:
    names = family.names
    where = "" if names.layer == PREFIXES[0] else f" below `{names.layer.removesuffix('.')}`"
    also = ["; also " + experts(other) for other in family.others if experts(other) != experts(names)]
    types = ", ".join(f"`{name}`" for name in family.model_types)
    cells = [experts(names) + where + "".join(also), router(names), shared(names)]
    files = {name for name in family.model_types if name.startswith("gguf:")}
    whole = of_types(family, (files & LAYERS_OF_FILES) | set(NOT_WHOLE))
    apart = files | set(NOT_WHOLE)
    loaded = set(family.model_types) - apart
    gpu = "in float32" if loaded and loaded <= FLOAT32_ON_GPU else of_types(family, apart | TEXT_PARTS | NEW_ON_GPU)
    return [f"`{family.name}`", types, *cells, BY_HAND.get(family.name, "class"), whole, gpu]


def table() -> list[str]:
    rows = [row(family) for family in FAMILIES]
    return ["| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *rows)]


def test_page_has_the_tensor_name_table() -> None:
    text = (ROOT / "docs" / "families.md").read_text(encoding="utf-8").splitlines()
    missing = [line for line in table() if line not in text]
    assert not missing, "docs/families.md lacks:\n" + "\n".join(missing)


def test_the_page_lists_the_model_types() -> None:
    text = (ROOT / "docs" / "families.md").read_text(encoding="utf-8").partition("## ")[0]
    listed, _, not_whole = text.partition("except ")
    assert [name for family in FAMILIES for name in family.model_types if f"`{name}`" not in listed] == []
    assert set(re.findall(r"`(\w[\w:-]*)`", not_whole)) == {*NOT_WHOLE, *LAYERS_OF_FILES}
