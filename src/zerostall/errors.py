"""Every error zerostall raises, in one tree.

ZerostallError                  what, which object, why; `.hint` says what to do
├── StateError                  (TypeError)          a state that could not be restored later; names every bad path
├── MismatchError               (ValueError)         stored and asked-for state differ in names, shapes or dtypes
├── FormatError                 (ValueError)         a file that is not what it claims to be
│   ├── CorruptError                                 bytes that fail their checksum, or are missing
│   │   └── ForeignStepError                         a step that is whole and another run's; names both runs
│   └── VersionError                                 written by a newer zerostall
├── RunMismatchError            (ValueError)         the folder belongs to another run
├── SnapshotNotFoundError       (FileNotFoundError)  no such step, or nothing saved yet
├── StepExistsError             (FileExistsError)    the step is already there
├── ReplacedError               (LookupError)        a newer snapshot took this one's place before it got that far
├── TornError                   (RuntimeError)       tensors changed while they were captured; names them
│   └── GhostError                                   other bytes arrived than the device held; names the tensors
├── NonFiniteError              (FloatingPointError) tensors that must be finite hold NaN or infinity; names them
├── StorageError                (OSError)            a disk or store refused; carries errno
├── RunBusyError                (RuntimeError)       another live trainer owns this run
├── RankError                   (RuntimeError)       another rank failed, or did not do what this one did; names it
├── AgentError                  (ConnectionError)    the agent cannot be reached or started
├── ManagerError                (ConnectionError)    the cluster's manager cannot be reached, or refuses; says which
├── CapacityError               (MemoryError)        a budget is too small; says needed and free
├── CapabilityError             (RuntimeError)       this machine or build cannot do that; says why
├── DeviceError                 (RuntimeError)       the CUDA driver refused
└── WaitTimeoutError            (TimeoutError)       it did not happen in time; it may still

Each is also the builtin that a caller would catch without knowing zerostall.
"""

from __future__ import annotations


class ZerostallError(Exception):
    """The root. `hint` is one sentence that says what to do about it."""

    hint: str

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = str(self.args[0]) if self.args else type(self).__name__
        return f"{message}\n  hint: {self.hint}" if self.hint else message


class StateError(ZerostallError, TypeError):
    """State that cannot be saved so that it can be restored; raised before anything is written."""


class MismatchError(ZerostallError, ValueError):
    """What is stored and what is asked for differ. Nothing of it has been written.

    Attributes:
        missing: names asked for and not stored.
        unexpected: names stored and not asked for.
        different: name -> what differs (shape or dtype), in words.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        different: dict[str, str] | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing
        self.unexpected = unexpected
        self.different = different or {}


class FormatError(ZerostallError, ValueError):
    """A file that is not what it claims to be."""


class CorruptError(FormatError):
    """Bytes that fail their checksum, or that are missing."""


class ForeignStepError(CorruptError):
    """A step that may be whole, and is another run's than the folder or URL it lies in. The message names both."""


class VersionError(FormatError):
    """A file written by a newer format version than this zerostall knows."""


class RunMismatchError(ZerostallError, ValueError):
    """The folder belongs to another run."""


class SnapshotNotFoundError(ZerostallError, FileNotFoundError):
    """No such step, or nothing saved yet."""


class StepExistsError(ZerostallError, FileExistsError):
    """The step is already there, or would go behind one that is."""


class ReplacedError(ZerostallError, LookupError):
    """A newer snapshot took this one's place before it got as far as was asked."""


class TornError(ZerostallError, RuntimeError):
    """Tensors changed behind the guard while they were captured: the snapshot is dirty and was thrown away."""


class GhostError(TornError):
    """Other bytes arrived than the device held at `save`: the snapshot is dirty and was thrown away."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(
            message,
            hint=hint
            or "see that the stream of `save` waits for every stream that writes them, and that nothing writes them "
            "past torch's version counters; else suspect the device or its driver (`zerostall doctor`)",
        )


class NonFiniteError(ZerostallError, FloatingPointError):
    """Tensors that `require_finite` names hold NaN or infinity. The snapshot was thrown away."""


class StorageError(ZerostallError, OSError):
    """A disk or store refused. `errno` is the operating system's."""

    def __init__(self, message: str, *, errno: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno


class RunBusyError(ZerostallError, RuntimeError):
    """Another live trainer owns this run."""


class RankError(ZerostallError, RuntimeError):
    """Another rank of this run failed, or did not do what this one did. The message has its number."""


class AgentError(ZerostallError, ConnectionError):
    """The agent cannot be reached or started."""


class ManagerError(ZerostallError, ConnectionError):
    """The cluster's manager cannot be reached, or refuses what was said.

    Attributes:
        kind: why it refuses (see `wire.cluster.Refusal`); "" when it cannot be reached.
    """

    def __init__(self, message: str, *, kind: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class CapacityError(ZerostallError, MemoryError):
    """A memory budget is too small for what is asked."""


class CapabilityError(ZerostallError, RuntimeError):
    """This machine or build cannot do what is asked; the message says why."""


class DeviceError(ZerostallError, RuntimeError):
    """The CUDA driver refused."""


class WaitTimeoutError(ZerostallError, TimeoutError):
    """It did not happen in time. It may still happen."""
