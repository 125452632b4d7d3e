"""Makes the file calls of other processes fail, and logs them in order.

    shim = Shim(compile_library(folder), folder)             # the `shim` fixture does this
    process = subprocess.Popen(..., env=shim.environment())
    with Faults(shim, op="write", match="*/rank-*.safetensors", error="EIO", nth=3, times=1) as fault:
        ...                                                  # rules come and go while the process runs
    assert fault.hits >= 3

    with Trace(shim, match="*/runs/*") as trace:
        ...
    trace.calls                                              # every call in order, with begin and end ticks

Operations: open direct read write fsync fdatasync truncate allocate rename link unlink rmdir mkdir, or "*".
"direct" is an open with O_DIRECT, or O_DIRECT switched on later. `match` is a glob over the absolute path, in
which `*` also matches slashes; a rename matches by either name. Matches are counted over all its processes.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

SOURCES = tuple(Path(__file__).parent / name for name in ("rules.c", "calls.c"))
COUNTS = 8192  # bytes of shared counters, as in rules.c
EDITION = 1
FOREVER = 0


def compile_library(folder: Path, compiler: str = "gcc") -> Path:
    """Compiles the shim into `folder` and returns the library to preload."""
    library = folder / "libzerostall_faults.so"
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run([compiler, *flags, *map(str, SOURCES), "-o", str(library)], check=True)
    return library


@dataclass(frozen=True)
class Call:
    """One finished file call of the trace."""

    begin: int
    end: int
    pid: int
    op: str
    result: int
    errno: int
    argument: int  # open: flags; read, write: file offset or -1; truncate: size; mkdir: mode
    path: str
    second: str  # the new name of a rename or link, else empty

    def after(self, other: Call) -> bool:
        """Whether this call was started only when the other had returned."""
        return self.begin > other.end


class Shim:
    """The control folder: rules, counters and trace shared by all processes started with `environment()`."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.library = library
        self.folder = folder
        self._lines: dict[int, str] = {}
        self._next_slot = 0
        folder.joinpath("rules").write_text("")
        folder.joinpath("trace").write_text("")
        counts = folder / "counts"
        counts.write_bytes(bytes(COUNTS))
        with counts.open("r+b") as file:
            self._counts = mmap.mmap(file.fileno(), COUNTS)

    def environment(self, base: dict[str, str] | None = None) -> dict[str, str]:
        """The environment of a process that is to obey this shim."""
        preload = [str(self.library), *filter(None, [os.environ.get("LD_PRELOAD")])]
        return {
            **(os.environ if base is None else base),
            "LD_PRELOAD": ":".join(preload),
            "ZEROSTALL_SHIM": str(self.folder),
        }

    def add(self, line: str) -> int:
        """Adds a rule (without its slot) and returns the slot it got."""
        slot = self._next_slot
        if (2 * slot + 4) * 8 > COUNTS:
            raise ValueError("all slots of this shim are used up: make a new one")
        self._next_slot += 1
        self._lines[slot] = f"{slot}\t{line}\n"
        self._publish()
        return slot

    def remove(self, slot: int) -> None:
        """Takes a rule away; calls held by it go on."""
        del self._lines[slot]
        self._publish()

    def count(self, index: int) -> int:
        """One shared counter."""
        return struct.unpack_from("=Q", self._counts, 8 * index)[0]

    def _publish(self) -> None:
        fresh = self.folder / "rules.new"
        fresh.write_text("".join(self._lines.values()))
        fresh.rename(self.folder / "rules")
        struct.pack_into("=Q", self._counts, 8 * EDITION, self.count(EDITION) + 1)


class Rule:
    """A rule that is in force inside its `with` block."""

    def __init__(
        self, shim: Shim, op: str, match: str, action: str, value: int, nth: int = 1, times: int = FOREVER
    ) -> None:
        if "\t" in match or "\n" in match:
            raise ValueError(f"a glob cannot hold tabs or line ends: {match!r}")
        if nth < 1 or times < 0:
            raise ValueError("nth counts from 1; times is 0 (for ever) or more")
        self.shim = shim
        self._line = "\t".join([op.replace(" ", ""), action, str(value), str(nth), str(times), match])
        self._slot: int | None = None
        self._active = False

    def __enter__(self) -> Self:
        self._slot = self.shim.add(self._line)
        self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lift()

    def lift(self) -> None:
        """Ends the rule before its block does."""
        if self._active and self._slot is not None:
            self._active = False
            self.shim.remove(self._slot)

    @property
    def hits(self) -> int:
        """How many calls matched so far, in all processes, whether or not the fault struck them."""
        return 0 if self._slot is None else self.shim.count(2 * self._slot + 2)


class Faults(Rule):
    """One kind of fault on the calls that match. Exactly one of the following says which:

    error: fails with this errno (a number or a name such as "EIO"), nothing done.
    short: moves at most that many bytes a call.
    room: a disk with that many bytes left: then short, then ENOSPC.
    delay: waits that many seconds first.
    kill: moves that many bytes (0: none, calls that move none do nothing) and then dies of SIGKILL.
    kill_after: does the call, then dies of SIGKILL.
    hold: waits until the rule is lifted.
    flip: flips one bit of what was read.

    The first `nth - 1` matches pass; the fault strikes `times` times (0: from then on always).
    """

    def __init__(
        self,
        shim: Shim,
        *,
        op: str,
        match: str = "*",
        nth: int = 1,
        times: int = FOREVER,
        error: int | str | None = None,
        short: int | None = None,
        room: int | None = None,
        delay: float | None = None,
        kill: int | None = None,
        kill_after: bool = False,
        hold: bool = False,
        flip: bool = False,
    ) -> None:
        chosen: dict[str, int] = {}
        if error is not None:
            chosen["error"] = getattr(errno, error) if isinstance(error, str) else error
        if delay is not None:
            chosen["delay"] = round(delay * 1e6)
        chosen |= {name: n for name, n in (("short", short), ("room", room), ("kill", kill)) if n is not None}
        chosen |= {name: 0 for name, on in (("kill-after", kill_after), ("hold", hold), ("flip", flip)) if on}
        if len(chosen) != 1:
            raise ValueError(f"choose exactly one fault, not {sorted(chosen) or 'none'}")
        ((action, value),) = chosen.items()
        super().__init__(shim, op, match, action, value, nth, times)


class Trace(Rule):
    """Logs the calls that match while the block lasts."""

    def __init__(self, shim: Shim, *, op: str = "*", match: str = "*") -> None:
        super().__init__(shim, op, match, "trace", 0)
        self._from = 0

    def __enter__(self) -> Self:
        self._from = self.shim.folder.joinpath("trace").stat().st_size
        return super().__enter__()

    @property
    def calls(self) -> list[Call]:
        """The calls so far, in the order in which they began."""
        with self.shim.folder.joinpath("trace").open("rb") as file:
            file.seek(self._from)
            lines = file.read().decode(errors="surrogateescape").split("\n")
        return sorted(map(_call, filter(None, lines)), key=lambda call: call.begin)


def _call(line: str) -> Call:
    begin, end, pid, op, result, error, argument, path, second = line.split("\t")
    return Call(
        int(begin),
        int(end),
        int(pid),
        op,
        int(result),
        int(error),
        int(argument),
        _plain(path),
        _plain(second),
    )


def _plain(escaped: str) -> str:
    parts = escaped.split("\\\\")
    return "\\".join(part.replace("\\t", "\t").replace("\\n", "\n") for part in parts)
