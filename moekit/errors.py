"""Every exception that moekit raises on purpose: what was wrong, where, and what to do.

A message names the thing, the value that was got and the remedy. Kinds that report a bad value are also
``ValueError``, so code that does not know moekit can still catch them.
"""


class MoekitError(Exception):
    """Base of all errors that moekit raises on purpose."""


class ConfigError(MoekitError, ValueError):
    """A setting, or a combination of settings, that cannot work. Raised before any work is done."""


class DataError(MoekitError, ValueError):
    """Training data that cannot be used as given. Names the file and line, or the example."""


class CheckpointError(MoekitError, ValueError):
    """A checkpoint or Hugging Face folder that is missing, broken, or does not fit the model."""


class NumericsError(MoekitError, ValueError):
    """NaN or infinity where there must be none, with the name of the tensor."""


class CapacityError(MoekitError, RuntimeError):
    """More routed rows than a rank's buffer holds, with `on_overflow="raise"`."""


class BackendError(MoekitError, RuntimeError):
    """A kernel or backend was asked for and cannot run here."""


class LearnerError(MoekitError, RuntimeError):
    """A learner that cannot be used now: closed, or left with half of a checkpoint."""


class EngineError(MoekitError, RuntimeError):
    """A rollout engine that cannot serve now: paused, or left with half of an update."""


class TransferError(MoekitError, RuntimeError):
    """Weights that did not arrive as they were sent; nothing of them serves."""


class CapabilityError(EngineError):
    """Something that this rollout engine cannot do was asked of it."""


class StaleCacheError(MoekitError, RuntimeError):
    """A quantised copy of a weight that is not of the weight as it is now."""


class RunExistsError(MoekitError, FileExistsError):
    """The run folder already holds a run; nothing was touched."""


class RunError(MoekitError, ValueError):
    """A run folder that is missing, is not one, or holds a broken record."""


class UnlikeRunsError(MoekitError, ValueError):
    """Runs that differ in more than what a comparison is about; names all of it, with the values."""


class StorageError(MoekitError, OSError):
    """A folder that cannot be written, or a disk that is full; nothing half-written was left behind."""


class JobError(MoekitError, RuntimeError):
    """A launched job failed; carries the first failing rank and its traceback."""

    def __init__(self, message: str, rank: int | None = None, traceback: str = ""):
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the rank's traceback, not that of the process which asked for it."""
        return f"JobError: {self}".splitlines()
