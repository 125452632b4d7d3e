"""What a user asks of an export or an import: the same few words on the command line, in Python and below."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from zerostall.core import matching, names
from zerostall.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ExportFormat: TypeAlias = Literal["safetensors", "huggingface", "dcp", "torch"]
ImportFormat: TypeAlias = Literal["safetensors", "huggingface", "dcp", "torch", "torch_checkpointing"]

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The types that `dtype` casts, and casts to. All others (integers, booleans, 8-bit floats, complex numbers) stay."""

SHARD_BYTES = 5_000_000_000
"""How large a shard of a Hugging Face folder gets when nothing is said."""

_ENDINGS: Mapping[str, ExportFormat] = MappingProxyType(
    {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which tensors to take, what to call them, and as what type.

    Attributes:
        only: patterns of names, as `restore(only=...)` takes them: `*` is any text, and one that begins with `!` leaves
            out what the others take. None: all.
        rename: regular expression -> replacement, one after the other, of the names as they come out otherwise.
        dtype: `bfloat16`, say: tensors of floating point of 16 to 64 bits become this, to the nearest number (ties to
            even). Other types stay as they are. None: all stay.
    """

    only: tuple[str, ...] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.only, str):
            raise ValueError(f"only takes a sequence of patterns: only=({self.only!r},)")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise ValueError(f"dtype is one of {', '.join(FLOATS)}, not {self.dtype!r}")
        matching.select(self.only, self.rename)

    def cast(self, dtype: str) -> str:
        """The type that a tensor of this type gets."""
        return self.dtype if self.dtype is not None and dtype in FLOATS else dtype

    def chosen(self, every: Sequence[str]) -> list[str]:
        """Those of these names that are asked for. ValueError for a pattern that fits none: it would be a slip."""
        if self.only is None:
            return list(every)
        for glob in self.only:
            pattern = matching.select(glob.removeprefix("!"))
            if not any(pattern.takes(name) for name in every):
                raise ValueError(f"only {glob}: no tensor has such a name; {names.roots(every)}")
        selection = matching.select(self.only)
        return [name for name in every if selection.takes(name)]

    def renamed(self, found: Sequence[str]) -> list[str]:
        """What these are called in the end. ValueError for an expression that is found in none."""
        selection = matching.select(None, self.rename)
        names_now = list(found)
        for pattern, replacement in selection.rename:
            if not any(pattern.search(name) for name in names_now):
                raise ValueError(f"rename {pattern.pattern}: found in no name")
            names_now = [pattern.sub(replacement, name) for name in names_now]
        return names_now


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(Choice):
    """What to export of a step, and how.

    Attributes:
        weights: modules alone, without optimizers and other state. Where there is one module, what it holds is named as
            its `state_dict()` does.
        root: take only what lies below this name, and leave the name itself out: `model.layers.0.weight` becomes
            `layers.0.weight`, spelled as `state_dict()` does.
        format: `safetensors` (one file), `huggingface` (a folder of shards with an index), `dcp` (a folder
            of torch.distributed.checkpoint) or `torch` (one file of torch.save). None: as the ending of the name says,
            and `huggingface` for a name without one.
        shard_size: of a Hugging Face folder, the most bytes of tensors a file gets; a larger tensor has one of its own.
        overwrite: what is there already may be replaced.
    """

    weights: bool = False
    root: str | None = None
    format: ExportFormat | None = None
    shard_size: int | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        super(ExportOptions, self).__post_init__()
        if self.weights and self.root is not None:
            raise ValueError("weights finds the module by itself: leave out root, or weights")
        if self.format is not None and self.format not in get_args(ExportFormat):
            raise ValueError(f"format is one of {', '.join(get_args(ExportFormat))}, not {self.format!r}")
        if self.shard_size is not None and (not isinstance(self.shard_size, int) or self.shard_size < 1):
            raise ValueError(f"shard_size is a number of bytes, not {self.shard_size!r}")
        if self.root is not None and not isinstance(self.root, str):
            raise TypeError(f"root={self.root!r} is no name")

    def format_of(self, out: str) -> ExportFormat:
        """The format of a file or folder of that name. ValueError for an ending that says none."""
        ending = out[out.rindex(".") :] if "." in out.strip(".") else ""
        found = self.format or (_ENDINGS.get(ending) if ending else "huggingface")
        if found is None:
            said = ", ".join(get_args(ExportFormat))
            endings = ", ".join(_ENDINGS)
            raise ValueError(f"the ending of {out} says no format ({endings} do); or say format= (--format): {said}")
        if self.shard_size is not None and found != "huggingface":
            raise ValueError(f"only a Hugging Face folder has shards; {out} is of the format {found}")
        return found

    def named(self, kinds: Mapping[str, str], found: Iterable[str]) -> dict[str, str]:
        """The names that tensors get, each with the name it has in the step.

        Args:
            kinds: of each part of the state (`model`, `optimizer`) its kind.
            found: the names of all tensors.

        Raises:
            ValueError: nothing is chosen, or two would have one name.
            CapabilityError: the step does not say which of its tensors are weights.
        """
        every = list(found)
        chosen, root = self.chosen(every), self.root
        if self.weights:
            modules = [name for name, kind in kinds.items() if kind in MODULE_KINDS]
            outermost = [name for name in modules if not any(name.startswith(other + ".") for other in modules)]
            if not outermost:
                raise CapabilityError("this step holds no module", hint="say with only or root what its weights are")
            starts = tuple(name + "." for name in outermost)
            chosen = [name for name in chosen if name.startswith(starts)]
            root = outermost[0] if len(outermost) == 1 else None
        pairs = [(name, short) for name in chosen if (short := below(root, name)) is not None]
        if not pairs and (self.only is not None or root is not None):
            raise ValueError(f"root {root}: no tensor has such a name; {names.roots(every)}")
        named: dict[str, str] = {}
        for (name, _), new in zip(pairs, self.renamed([short for _, short in pairs]), strict=True):
            if new == "__metadata__":
                raise ValueError(f"{name!r} cannot be called {new!r}: safetensors keeps that name for itself")
            if new in named:
                raise ValueError(f"{named[new]!r} and {name!r} would both become {new!r}")
            named[new] = name
        return named


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions(Choice):
    """What to take of somebody's checkpoint, and what to make of it.

    Attributes:
        root: the name that goes before the name of each tensor of a model's file (safetensors, or a torch.save file
            that is a dict of tensors). Empty: the names are whole ones already, root and all.
        key: of a checkpoint of several things (a dict in a torch.save file, a folder of items), take this one alone.
        format: `safetensors`, `huggingface`, `dcp`, `torch` or `torch_checkpointing`. None: what it looks like.
        run: a name for the run, as `Checkpointer(run=...)` gives it.
        replace: a step of that number may be replaced.
    """

    root: str = "model"
    key: str | None = None
    format: ImportFormat | None = None
    run: str | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        super(ImportOptions, self).__post_init__()
        if not isinstance(self.root, str):
            raise TypeError(f"root={self.root!r} is no name; '' for whole names")
        if self.format is not None and self.format not in get_args(ImportFormat):
            raise ValueError(f"format is one of {', '.join(get_args(ImportFormat))}, not {self.format!r}")


MODULE_KINDS = ("module", "module state")
"""Kinds of the parts of a state that are a module's."""


def below(root: str | None, name: str) -> str | None:
    """A name without the root before it, as `state_dict()` spells it; None for one that does not lie below the root."""
    if root is None:
        return name
    path, start = names.split(name), names.split(root)
    if path[: len(start)] != start or len(path) == len(start):
        return None
    rest = path[len(start) :]
    texts = [part for part in rest if isinstance(part, str)]
    return ".".join(texts) if len(texts) == len(rest) else names.join(rest)
