"""From a published checkpoint to text: audit, load one layer, then let transformers run the rest of the model."""

from __future__ import annotations

from pathlib import Path

import torch

from collegium import load_layer
from collegium.commands.generate import Writer
from collegium.commands.inspect import inspect_model
from collegium.integrations.transformers import load_model

FOLDER = Path(__file__).resolve().parents[1] / "demo" / "fables-16m"


def main() -> None:
    for what, found in inspect_model(str(FOLDER)).lines():
        print(f"{what:14} {found}")
    layer = load_layer(FOLDER, layer=3, device="cpu")
    x = torch.randn(7, layer.spec.hidden_size).bfloat16()
    print(f"\nlayer 3: {tuple(x.shape)} -> {tuple(layer(x).shape)}\n")
    model = load_model(str(FOLDER), weight_format="mxfp4", device="cpu")
    written = Writer(model, FOLDER).write("The wolf said to the", 40, penalty=1.2)
    print(f"{written.text}\n({written.tokens_per_second:.0f} tokens/s with MXFP4 experts)")


if __name__ == "__main__":
    main()
