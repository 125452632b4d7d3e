"""What a request that fails is answered with, and an error's way over the socket."""

from __future__ import annotations

from zerostall import errors
from zerostall.wire.message import Message


def plain(text: str) -> str:
    """A text that may hold a path that is no text: what cannot be encoded is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


class Refused(Message, frozen=True):
    """The request failed. `kind` is the name of a class in `zerostall.errors`."""

    id: int
    kind: str
    message: str
    hint: str = ""
    errno: int | None = None

    @classmethod
    def of(cls, request: int, error: errors.ZerostallError) -> Refused:
        text = plain(str(error.args[0]) if error.args else str(error))
        number = error.errno if isinstance(error, errors.StorageError) else None
        return cls(id=request, kind=type(error).__name__, message=text, hint=error.hint, errno=number)

    def error(self) -> errors.ZerostallError:
        """The error that the other side raised, as the same class."""
        return rebuild_error(self.kind, self.message, hint=self.hint, errno=self.errno)


def rebuild_error(kind: str, message: str, *, hint: str = "", errno: int | None = None) -> errors.ZerostallError:
    """An error that crossed the socket. An unknown kind becomes `AgentError`: the name is never looked up blindly."""
    cls = getattr(errors, kind, None)
    if not (isinstance(cls, type) and issubclass(cls, errors.ZerostallError)):
        return errors.AgentError(f"{kind}: {message}", hint=hint)
    if issubclass(cls, errors.StorageError):
        return cls(message, errno=errno, hint=hint)
    return cls(message, hint=hint)
