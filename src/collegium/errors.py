"""Every error Collegium raises, in one tree.

::

    CollegiumError
    ├── SpecError          a specification contradicts itself (also a ValueError)
    ├── InputError         a call's tensors or arguments are not allowed (also a ValueError)
    │   └── RoutingError   NaN logits, out-of-range or duplicate expert ids in checked mode
    ├── CheckpointError    a file cannot be read as what it claims to be
    │   ├── HostileFileError   the bytes break the rules of safetensors or GGUF
    │   ├── TruncatedFileError a file ends before the last byte that its header describes
    │   ├── MissingTensorError / UnknownTensorError / DuplicateTensorError
    │   ├── TensorMismatchError    shape or dtype is not what the config implies
    │   ├── BadScaleError      a scale is NaN, infinite, negative or a forbidden zero
    │   └── ConfigError        config.json is unreadable, unknown, or contradicts the tensors
    ├── PlanError          no kernel can run the problem; lists every refusal
    ├── RankError          another rank is gone, late, or does something else; names rank and phase
    ├── MeasurementError   a layer to be measured computes something else than FP32 truth
    └── MissingExtraError  an optional package is needed (also an ImportError)

Every text says what was asked, what was found, what is allowed and what to do next.
"""

from functools import partial

__all__ = [
    "BadScaleError",
    "CheckpointError",
    "CollegiumError",
    "ConfigError",
    "DuplicateTensorError",
    "HostileFileError",
    "InputError",
    "MeasurementError",
    "MissingExtraError",
    "MissingTensorError",
    "PlanError",
    "RankError",
    "RoutingError",
    "SpecError",
    "TensorMismatchError",
    "TruncatedFileError",
    "UnknownTensorError",
]


class CollegiumError(Exception):
    """Base of all errors raised on purpose."""


class SpecError(CollegiumError, ValueError):
    """A specification contradicts itself."""


class InputError(CollegiumError, ValueError):
    """An argument of a call is not allowed."""


class RoutingError(InputError):
    """Routing data is not finite, out of range or duplicated (checked mode only)."""


class CheckpointError(CollegiumError):
    """A checkpoint cannot be read as what it claims to be."""


class HostileFileError(CheckpointError):
    """A file breaks the rules of the safetensors or the GGUF format."""


class TruncatedFileError(CheckpointError):
    """A file ends before the last byte that its header describes; what is there is in order."""


class MissingTensorError(CheckpointError):
    """A tensor that the name table expects is not in the checkpoint."""


class UnknownTensorError(CheckpointError):
    """The checkpoint holds an expert tensor that the name table does not know."""


class DuplicateTensorError(CheckpointError):
    """A tensor appears in two files with different bytes."""


class TensorMismatchError(CheckpointError):
    """A tensor's shape or dtype, or an entry of a hash table, is not what the config implies."""


class BadScaleError(CheckpointError):
    """A scale is NaN, infinite, negative, or zero where the format forbids it."""


class ConfigError(CheckpointError):
    """config.json is unreadable, names something unknown, or contradicts the tensors."""


class PlanError(CollegiumError):
    """No kernel can run the problem; the text lists every refusal."""


class MeasurementError(CollegiumError):
    """What is to be measured computes the wrong numbers; no time is given."""


class RankError(CollegiumError):
    """Another rank is gone, late, or does something else than this one; this rank can go on without it.

    ranks: which. phase: what this rank waited for.
    """

    def __init__(self, text: str, *, ranks: tuple[int, ...], phase: str) -> None:
        super().__init__(text)
        self.ranks, self.phase = ranks, phase

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with ranks and phase, as a process that starts others passes errors on."""
        return partial(RankError, ranks=self.ranks, phase=self.phase), (str(self),)


class MissingExtraError(CollegiumError, ImportError):
    """An optional package is needed; the text names the extra to install."""
