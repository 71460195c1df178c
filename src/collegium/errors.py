"""All errors of Collegium, in one class hierarchy.

::

    CollegiumError
    ├── SpecError          a specification contradicts itself (also a ValueError)
    ├── InputError         a call's tensors or arguments are not allowed (also a ValueError)
    │   └── RoutingError   NaN logits, out-of-range or duplicate expert ids in checked mode
    ├── CheckpointError    a checkpoint cannot be read
    │   ├── HostileFileError   the bytes violate the safetensors or GGUF format
    │   ├── TruncatedFileError a file ends before the last byte that its header describes
    │   ├── MissingTensorError / UnknownTensorError / DuplicateTensorError
    │   ├── TensorMismatchError    shape or dtype contradicts the config
    │   ├── BadScaleError      a scale is NaN, infinite, negative or a forbidden zero
    │   └── ConfigError        config.json is unreadable, unknown, or contradicts the tensors
    ├── PlanError          no kernel can run the problem; lists every refusal
    ├── RankError          another rank is dead, late, or out of step; has rank and phase
    ├── MeasurementError   a layer to be measured computes wrong results
    └── MissingExtraError  an optional package is needed (also an ImportError)

Every message contains what was requested, what was found, what is allowed and what to do next.
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
    """A checkpoint cannot be read."""


class HostileFileError(CheckpointError):
    """A file violates the safetensors or the GGUF format."""


class TruncatedFileError(CheckpointError):
    """A file ends before the last byte that its header describes; the header itself is valid."""


class MissingTensorError(CheckpointError):
    """A tensor that the name table expects is not in the checkpoint."""


class UnknownTensorError(CheckpointError):
    """The checkpoint holds an expert tensor that is not in the name table."""


class DuplicateTensorError(CheckpointError):
    """A tensor appears in two files with different bytes."""


class TensorMismatchError(CheckpointError):
    """A tensor's shape or dtype, or an entry of a hash table, contradicts the config."""


class BadScaleError(CheckpointError):
    """A scale is NaN, infinite, negative, or zero where the format forbids it."""


class ConfigError(CheckpointError):
    """config.json is unreadable, names something unknown, or contradicts the tensors."""


class PlanError(CollegiumError):
    """No kernel can run the problem; the message lists every refusal."""


class MeasurementError(CollegiumError):
    """A layer to be measured computes wrong results; no time is reported."""


class RankError(CollegiumError):
    """Another rank is dead, late, or out of step; this rank can continue without it.

    ranks: the other ranks. phase: the step in which this rank waited for them.
    """

    def __init__(self, text: str, *, ranks: tuple[int, ...], phase: str) -> None:
        super().__init__(text)
        self.ranks = ranks
        self.phase = phase

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with ranks and phase, so that a parent process can receive the error."""
        return partial(RankError, ranks=self.ranks, phase=self.phase), (str(self),)


class MissingExtraError(CollegiumError, ImportError):
    """An optional package is needed; the message names the extra to install."""
