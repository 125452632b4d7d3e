"""Framed messages and file descriptors over a Unix socket.

A frame is a 4-byte length, a 1-byte count of file descriptors, then the message in MessagePack. The descriptors ride on
the frame's first byte (SCM_RIGHTS). A frame over `MAX_FRAME` or one that does not decode ends the connection.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from zerostall.errors import AgentError

if TYPE_CHECKING:
    from zerostall.wire import messages

MAX_FRAME = 512 << 20  # a layout of millions of tensors fits; a length from a confused peer does not
MAX_BACKLOG = 64 << 20
_HEADER = struct.Struct("!IB")
_FDS_A_READ = 8

In = TypeVar("In")


class ClosedError(AgentError):
    """The other side is gone."""


class Channel(Generic[In]):
    """One end of a connection, over a connected stream socket that it owns.

    `incoming` is the union of messages this end understands. Sending is for one thread at a time, and so is receiving.
    """

    def __init__(self, sock: socket.socket, incoming: object) -> None:
        self.socket = sock
        self._decoder = msgspec.msgpack.Decoder(incoming)  # pyright: ignore[reportArgumentType, reportCallIssue]
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._kept: list[tuple[In, list[int]]] = []
        self._outbox: deque[tuple[memoryview, list[int]]] = deque()
        self._backlog = 0

    def fileno(self) -> int:
        return self.socket.fileno()

    def shut(self) -> None:
        """End the conversation: a thread that waits in `receive` wakes up with `ClosedError`."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took, and let go of half a message."""
        for _, fds in self._kept:
            drop(fds)
        while self._fds:
            os.close(self._fds.popleft())
        self._buffer.clear()  # whoever still knows this channel keeps no memory for it
        self._outbox.clear()
        self.socket.close()

    # ------------------------------------------------------------------------------------------------ sending

    def send(self, message: messages.Message, *fds: int) -> None:
        """Queue a message and write what the socket takes now; `flush` writes the rest.

        On a blocking socket everything is written. The descriptors are duplicated by the kernel; the caller keeps
        its own, and must keep them open until `flush` says that all is written.

        Raises:
            ClosedError: the other side is gone, or has not read for so long that `MAX_BACKLOG` bytes wait.
        """
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_FRAME:
            raise AgentError(f"{type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME}")
        frame = _HEADER.pack(len(body), len(fds)) + body
        try:
            self._outbox.append((memoryview(frame), list(fds)))
            self._backlog += len(frame)
            self.flush()
        except ClosedError:
            raise
        except BaseException:
            self.shut()  # interrupted, by Ctrl-C say: how much the other side has of it is not known
            raise
        if self._backlog > MAX_BACKLOG + len(frame):
            raise ClosedError("the other side does not read its messages")

    def flush(self) -> bool:
        """Write what the socket takes; True when nothing is left."""
        while self._outbox:
            frame, fds = self._outbox[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self.socket.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as error:
                raise ClosedError(f"the connection broke: {error}") from error
            self._backlog -= sent
            if sent == len(frame):
                self._outbox.popleft()
            else:
                self._outbox[0] = (frame[sent:], [])
        return True

    def flush_quietly(self) -> bool:
        """`flush`, but a broken connection counts as nothing left: reading will say that it broke."""
        try:
            return self.flush()
        except ClosedError:
            return True

    # ---------------------------------------------------------------------------------------------- receiving

    def pending(self, seconds: float = 0.0) -> bool:
        """Has the other side said something, or gone, since the last `receive`? Waits that long for it."""
        if self._kept:
            return True
        waiting = select.poll()
        waiting.register(self.socket, select.POLLIN)
        return bool(waiting.poll(max(0.0, seconds) * 1e3))

    def keep(self, messages: list[tuple[In, list[int]]]) -> None:
        """Have the next `receive` return these, which were received and are for somebody else."""
        self._kept += messages

    def receive(self) -> list[tuple[In, list[int]]]:
        """Read what has come and return the whole messages in it, each with its file descriptors.

        Blocks for the first byte on a blocking socket. The caller owns the descriptors.

        Raises:
            ClosedError: the other side is gone, or said something that is not a message.
        """
        if self._kept:
            kept, self._kept = self._kept, []
            return kept
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(1 << 18, socket.CMSG_SPACE(4 * _FDS_A_READ))
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise ClosedError(f"the connection broke: {error}") from error
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                for fd in received:
                    os.set_inheritable(fd, False)
                self._fds.extend(received)
        if not data:
            raise ClosedError("the other side has closed the connection")
        if flags & socket.MSG_CTRUNC:
            raise ClosedError("file descriptors were lost on the way: this process has too many open")
        self._buffer += data
        return list(self._whole_frames())

    def _whole_frames(self):
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                length, fd_count = _HEADER.unpack_from(self._buffer, start)
                if length > MAX_FRAME or fd_count > _FDS_A_READ:
                    raise ClosedError(f"a frame of {length} bytes and {fd_count} descriptors is no message of ours")
                end = start + _HEADER.size + length
                if len(self._buffer) < end:
                    break
                if len(self._fds) < fd_count:
                    raise ClosedError("a message came without its file descriptors")
                body = memoryview(self._buffer)[start + _HEADER.size : end]
                try:
                    message = self._decoder.decode(body)
                except msgspec.MsgspecError as error:
                    raise ClosedError(f"not a message: {error}") from error
                finally:
                    body.release()
                start = end
                yield message, [self._fds.popleft() for _ in range(fd_count)]
        finally:
            del self._buffer[:start]


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end of a Unix socket, as the kernel knows them."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def process_lives(pid: int) -> bool:
    """Is that process there, and not just waiting to be reaped?"""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def drop(fds: list[int]) -> None:
    """Close descriptors that nobody needs."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
