"""Models in GGUF files: the config is the metadata of the architecture, the names are those of ``read_gguf``.

Routing follows llama.cpp where the metadata do not state it (``load_arch_hparams`` of each architecture and
``build_moe_ffn``): a bias ``exp_probs_b`` affects the choice of experts wherever a file has one, whatever the score
function, and never their weights. llama.cpp divides by a sum of chosen weights of at least 2^-14, which no published
router comes near; here it is divided as the model's own code does. Architectures with another kind of expert are in
files of their names: ``gguf_gpt_oss`` (biases), ``gguf_llama4``, ``gguf_nemotron_h`` and ``gguf_qwen2moe`` (a gate of
the shared expert).
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ..errors import ConfigError
from ..types import ActivationSpec, MoESpec, RoutingSpec, ScoreFunction, SharedSpec
from .base import Config, Family, Names, StackedNames

__all__ = ["FAMILY", "NAMES", "gguf_layers", "gguf_spec"]

_SCORES: Mapping[int, ScoreFunction] = {1: "softmax", 2: "sigmoid", 3: "topk_softmax", 4: "sqrt_softplus"}
_SIGMOID = 2


class _Architecture(NamedTuple):
    """The defaults of llama.cpp for absent metadata, and whether files have a correction bias.

    score: a key of ``_SCORES``; None where the metadata must have one. renormalize: whether the chosen weights are
    renormalised. bias: when the correction bias is used. shared: whether each layer has a shared expert without an
    ``expert_shared_count``. floor: least sum of weights to divide by, which the metadata lack.

    widths: how files without the widths of experts and of the shared expert have them: ``all chosen``, the width of a
    layer is that of all chosen experts and of the shared one; ``alike``, the shared expert has that of an expert;
    ``stated``, the shared expert's is required. step: whether the metadata have the step between layers with experts.
    family_file: whether another file describes the architecture.
    """

    score: int | None
    renormalize: bool
    bias: Literal["never", "if present", "always"] = "never"
    shared: bool = False
    floor: float = 0.0
    widths: Literal["stated", "alike", "all chosen"] = "stated"
    step: Literal["never", "if present", "always"] = "never"
    family_file: bool = False


_QWEN2 = _Architecture(1, False, shared=True, widths="all chosen", family_file=True)
_QWEN3 = _QWEN2._replace(renormalize=True)
_ARCHITECTURES: Mapping[str, _Architecture] = {
    "gguf:llama": _Architecture(1, True),  # Mixtral
    "gguf:qwen3moe": _Architecture(1, True),
    "gguf:olmoe": _Architecture(1, False),
    "gguf:deepseek2": _Architecture(1, False, "if present"),
    "gguf:glm4moe": _Architecture(_SIGMOID, False, "always"),
    "gguf:gpt-oss": _Architecture(3, True, family_file=True),
    "gguf:qwen2moe": _QWEN2,
    "gguf:ernie4_5-moe": _Architecture(1, True, "if present", floor=1e-12, step="if present"),
    "gguf:hunyuan-moe": _Architecture(1, True, shared=True),
    "gguf:bailingmoe2": _Architecture(None, False, "if present"),
    "gguf:minimax-m2": _Architecture(None, True, "always"),
    "gguf:lfm2moe": _Architecture(None, True, "always"),
    "gguf:kimi-linear": _Architecture(None, True, "always"),
    "gguf:qwen3next": _QWEN3,
    "gguf:qwen35moe": _QWEN3,
    "gguf:llama4": _Architecture(_SIGMOID, False, shared=True, widths="alike", step="always", family_file=True),
    "gguf:nemotron_h_moe": _Architecture(_SIGMOID, False, "always", family_file=True),
}
# GLM-4.7-Flash has the architecture of DeepSeek-V2 and files without a gating function: llama.cpp identifies them by
# these sizes.
_FLASH_LAYERS = (47, 48)
_FLASH_VOCABULARY = 154880

NAMES = Names.below(
    "blk.{layer}.",
    experts="ffn_exps.",
    single=("gate", "up", "down"),
    stacked=StackedNames(gate_up="ffn_exps.gate_up", down="ffn_exps.down"),
    router="ffn_gate_inp.weight",
    correction_bias="exp_probs_b.bias",
    shared=("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
)


def gguf_spec(config: Config, _layer: int) -> MoESpec:
    """Return the spec by the metadata, with SwiGLU and without biases."""
    architecture = _ARCHITECTURES[config.kind]
    # Set by ``read_gguf``; without it, the score function decides whether there is a bias.
    present = config.value("exp_probs_b", default=None)
    function = _gating_function(config, architecture, bias=present is True)
    sigmoid = function == _SIGMOID
    biased = architecture.bias == "always"
    if architecture.bias == "if present":
        biased = sigmoid if present is None else present is True
    width = _expert_width(config, architecture)
    shared_width = _shared_width(config, architecture, width)
    return MoESpec(
        hidden_size=config.integer("embedding_length"),
        intermediate_size=width,
        num_experts=config.integer("expert_count"),
        routing=RoutingSpec(
            top_k=config.integer("expert_used_count"),
            score=_SCORES[function],
            renormalize=config.flag("expert_weights_norm", default=architecture.renormalize),
            renormalize_eps=1e-20 if sigmoid else 0.0,
            renormalize_floor=architecture.floor,
            groups=config.integer("expert_group_count", default=1),
            topk_groups=config.integer("expert_group_used_count", default=1),
            group_score="top2_sum" if sigmoid or biased else "max",
            scale=config.number("expert_weights_scale", default=1.0) or 1.0,
            correction_bias=biased,
        ),
        shared=SharedSpec(intermediate_size=shared_width) if shared_width else None,
        activation=ActivationSpec(),
    )


def _expert_width(config: Config, architecture: _Architecture) -> int:
    if config.value("expert_feed_forward_length", default=None) is not None:
        return config.integer("expert_feed_forward_length")
    width = config.integer("feed_forward_length")
    return width // config.integer("expert_used_count") if architecture.widths == "all chosen" else width


def _shared_width(config: Config, architecture: _Architecture, width: int) -> int:
    """Return the width of the shared expert, 0 if there is none."""
    shared = config.integer("expert_shared_count", default=0)
    if not architecture.shared:
        return config.integer("expert_shared_feed_forward_length", default=shared * width) if shared else 0
    missing = config.value("expert_shared_feed_forward_length", default=None) is None
    if missing and architecture.widths == "all chosen":
        return config.integer("feed_forward_length")
    if missing and architecture.widths == "alike":
        return width
    return config.integer("expert_shared_feed_forward_length")


def _gating_function(config: Config, architecture: _Architecture, *, bias: bool) -> int:
    """Return the score function's number; bias: whether the file has ``exp_probs_b``."""
    function = config.value("expert_gating_func", default=None)
    if function is None or function == 0:  # 0 is none in llama.cpp
        ahead = config.integer("nextn_predict_layers", default=0)
        layers = (config.integer("block_count"), config.integer("block_count") - ahead)
        flash = any(count in _FLASH_LAYERS for count in layers)
        if config.kind == "gguf:deepseek2" and flash and config.value("vocab_size", default=0) == _FLASH_VOCABULARY:
            return _SIGMOID
        if bias and config.kind == "gguf:deepseek2":
            raise ConfigError(
                "GGUF metadata: expert_gating_func is missing and the file has exp_probs_b, the bias of models with "
                "sigmoid scores; without the entry llama.cpp uses softmax. Set deepseek2.expert_gating_func to 2 "
                "(sigmoid) or 1 (softmax), for instance with gguf_new_metadata of the gguf package"
            )
        if architecture.score is None:
            allowed = ", ".join(f"{n} ({s})" for n, s in _SCORES.items())
            raise config.wrong("expert_gating_func", function, f"{allowed}; llama.cpp has no default for {config.kind}")
        return architecture.score
    number = config.integer("expert_gating_func")
    if number not in _SCORES:
        raise config.wrong("expert_gating_func", number, ", ".join(f"{n} ({s})" for n, s in _SCORES.items()))
    return number


def gguf_layers(config: Config) -> tuple[int, ...]:
    """Return the layers between the leading dense ones and those for multi-token prediction, by a step if stated."""
    ahead = config.integer("nextn_predict_layers", default=0)
    first = config.integer("leading_dense_block_count", default=0)
    # Families with a spec of another kind, such as Gemma-4, are in no row.
    stated = _ARCHITECTURES[config.kind].step if config.kind in _ARCHITECTURES else "never"
    step = 1
    if stated == "if present":
        step = config.integer("interleave_moe_layer_step", default=1)
    elif stated == "always":
        step = config.integer("interleave_moe_layer_step")
    if step < 1:
        raise config.wrong("interleave_moe_layer_step", step, "1 or more")
    return tuple(i for i in range(first, config.integer("block_count") - ahead) if (i + 1) % step == 0)


_TYPES = tuple(name for name, architecture in _ARCHITECTURES.items() if not architecture.family_file)
FAMILY = Family("gguf", _TYPES, NAMES, gguf_spec, gguf_layers)
