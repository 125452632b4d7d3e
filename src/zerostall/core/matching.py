"""Which stored tensor goes where: names, shapes and types compared in full before a byte is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import msgspec

from zerostall.core import names
from zerostall.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

Facts: TypeAlias = tuple[str, tuple[int, ...]]
"""Type (torch's name) and shape of a tensor."""

Strict: TypeAlias = bool | Literal["stored"]
"""Whether stored and wanted names must be the same; with "stored" it is enough that all that is stored is wanted."""

_LISTED = 20
_BELOW = r"(?:(?<!\\)[.\[].*)?"  # a dot or bracket that is part of a name stands behind a backslash


class Glob(msgspec.Struct, frozen=True):
    """One pattern of names, and the text that the user wrote for it."""

    text: str
    pattern: re.Pattern[str]

    def fits(self, name: str) -> bool:
        return self.pattern.fullmatch(name) is not None

    def may_fit_below(self, root: str) -> bool:
        """Return whether it could fit a name below that one, whatever comes to be there."""
        begin, *wild = re.split(r"[*?]", self.text.removeprefix("!"))
        return begin == root or begin.startswith((root + ".", root + "[")) or (bool(wild) and root.startswith(begin))


class Selection(msgspec.Struct, frozen=True):
    """Which names a restore is about, and what they are called in the snapshot. Made by `select`.

    Attributes:
        only: patterns of names to take; None for all.
        never: patterns of names to leave, whatever `only` says.
        rename: pattern and replacement, applied one after the other.
    """

    only: tuple[Glob, ...] | None = None
    never: tuple[Glob, ...] = ()
    rename: tuple[tuple[re.Pattern[str], str], ...] = ()

    @property
    def everything(self) -> bool:
        """Whether there is no name that it does not take."""
        return self.only is None and not self.never

    def takes(self, name: str) -> bool:
        """Return whether this name of the target is asked for."""
        if self.everything:
            return True
        wanted = self.only is None or any(glob.fits(name) for glob in self.only)
        return wanted and not any(glob.fits(name) for glob in self.never)

    def takes_part(self, name: str) -> bool:
        """Return whether a whole part is asked for: `ema`, `ema*` and `ema.*` all ask for `ema`."""
        if self.everything:
            return True
        texts = (name, name + ".")
        asked = self.only is None or any(glob.fits(text) for glob in self.only for text in texts)
        return asked and not any(glob.fits(text) for glob in self.never for text in texts)

    def stored_name(self, name: str) -> str:
        """Return what a name of the target is called in the snapshot."""
        for pattern, replacement in self.rename:
            name = pattern.sub(replacement, name)
        return name


class Match(msgspec.Struct, frozen=True):
    """What fits and what does not.

    Attributes:
        pairs: (stored name, wanted name), in the order of the wanted ones. One stored tensor may fill
            several.
        missing: names wanted and not stored.
        unexpected: names stored and not wanted.
        different: wanted name -> what differs, in words. Never tolerated: `only` can leave such a tensor out.
        renamed: wanted name -> under what name it was looked for, where that is another.
        strict: whether missing and unexpected names are an error; with "stored" unexpected ones alone.
        wrapped: whether more would fit without what wrappers add to names.
    """

    pairs: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: dict[str, str]
    renamed: dict[str, str]
    strict: Strict
    wrapped: bool = False


def select(
    only: str | Iterable[str] | None = None, rename: Mapping[str, str] | None = None, *, option: str = "only"
) -> Selection:
    """Read what a user asked for.

    Args:
        only: globs of names in the target: `*` is any text, dots too, `?` one character, all else itself (also
            brackets, which names are full of). What a glob takes it takes with all that is below it: `model` takes
            `model.0.weight`, and not `model2`. One that begins with `!` leaves out what the others take.
        rename: regular expression -> replacement, as in `re.sub`: makes of a name in the target the stored one.
        option: what the patterns were given as, for messages.

    ValueError for an expression that cannot be read, or an empty `only`; TypeError for what is none.
    """
    globs = patterns(only, option)
    if globs is not None and not globs:
        raise ValueError(f"{option}=[]: an empty list of patterns takes nothing")
    if rename is not None and not isinstance(rename, Mapping):
        raise TypeError(f"rename={rename!r} is no dict of regular expression -> replacement")
    never = [_glob(glob, 1) for glob in globs or () if glob.startswith("!")]
    wanted = [_glob(glob) for glob in globs or () if not glob.startswith("!")]
    return Selection(tuple(wanted) or None, tuple(never), tuple(_rule(*rule) for rule in (rename or {}).items()))


def insist_on_strict(strict: Strict) -> None:
    """ValueError for what is none."""
    if strict not in (True, False, "stored"):
        raise ValueError(f"strict={strict!r} is none of True, False, 'stored'")


def patterns(given: object, option: str = "only") -> list[str] | None:
    """What a user gave as one pattern or several, as a list; None where nothing was given."""
    if given is None:
        return None
    globs = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"{option}={given!r} is no pattern of names, and no list of such")
    return cast("list[str]", globs)


def match(
    stored: Mapping[str, Facts],
    wanted: Mapping[str, Facts],
    *,
    only: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    strict: Strict = True,
    prefixes: bool = False,
) -> Match:
    """Compare what is stored with what is wanted.

    Args:
        stored: name -> type and shape in the snapshot.
        wanted: the same of the target.
        only, rename: as in `select`. With `only`, stored names count as unexpected if it takes them.
        strict: see Match; written into the result for `raise_for`.
        prefixes: names that do not match as they are may match without the parts that wrappers add
            (`names.strip_wrappers`), on either side, where that is unambiguous.

    ValueError where a glob of `only` or an expression of `rename` fits no wanted name: it would be a slip.
    """
    insist_on_strict(strict)
    selection = select(only, rename)
    insist_on_use(selection, wanted)
    if selection.everything and not selection.rename:
        chosen = {name: name for name in wanted}
    else:
        chosen = {name: selection.stored_name(name) for name in wanted if selection.takes(name)}
    if not chosen and only is not None:
        raise ValueError("only= leaves nothing to restore")
    found = {name: target for name, target in chosen.items() if target in stored}
    used = set(found.values())
    bare = _unwrapped(stored, chosen, used)
    if prefixes:
        found |= bare
        used |= set(bare.values())
    pairs = tuple((found[name], name) for name in chosen if name in found)
    different = {name: text for target, name in pairs if (text := _difference(stored[target], wanted[name]))}
    return Match(
        pairs=pairs,
        missing=tuple(name for name in chosen if name not in found),
        unexpected=tuple(name for name in stored if name not in used and selection.takes(name)),
        different=different,
        renamed={name: target for name, target in chosen.items() if target != name},
        strict=strict,
        wrapped=bool(bare) and not prefixes,
    )


def raise_for(match: Match, *, what: str = "the snapshot") -> None:
    """Raise MismatchError where a match may not be restored; it names the first 20 of each kind, and holds
    all.

    `what` is what the message calls the stored side.
    """
    too_much, too_little = match.strict and match.unexpected, match.strict is True and match.missing
    if not (match.different or too_much or too_little):
        return
    missing = [_sought(match, name) for name in match.missing]
    different = [f"{name}: {text}" for name, text in match.different.items()]
    counts = f"{len(missing)} missing, {len(match.unexpected)} unexpected, {len(different)} different"
    lines = [
        f"{what} does not fit: {counts}",
        *_listed("missing (asked for, not stored)", missing),
        *_listed("unexpected (stored, not asked for)", match.unexpected),
        *_listed("different", different),
    ]
    raise MismatchError(
        "\n".join(lines),
        missing=match.missing,
        unexpected=match.unexpected,
        different=match.different,
        hint=_hint(match),
    )


def _glob(text: str, begin: int = 0) -> Glob:
    parts = re.split(r"([*?])", re.sub(r"\*+", "*", text[begin:]))
    expression = "".join({"*": ".*", "?": "."}.get(part) or re.escape(part) for part in parts)
    return Glob(text, re.compile(expression + _BELOW, re.DOTALL))


def _rule(pattern: str, replacement: str) -> tuple[re.Pattern[str], str]:
    if not isinstance(pattern, str) or not isinstance(replacement, str):
        raise TypeError(f"rename {pattern!r} to {replacement!r}: both must be text")
    try:
        compiled = re.compile(pattern)
        # What is wrong with a replacement shows only in use: here, on empty groups of the same names.
        named = {index: name for name, index in compiled.groupindex.items()}
        groups = [f"(?P<{named[at]}>)" if at in named else "()" for at in range(1, compiled.groups + 1)]
        re.sub("".join(groups), replacement, "")
    except (re.error, IndexError) as error:
        raise ValueError(f"rename {pattern!r} to {replacement!r}: {error}") from None
    return compiled, replacement


def insist_on_use(
    selection: Selection, wanted: Iterable[str], option: str = "only", growing: Sequence[str] = ()
) -> None:
    """ValueError, with the option's name, where a pattern of `selection` fits none of these names.

    `growing`: parts below which there may be more names later; what could fit one of these is let pass.
    """
    names_left = list(wanted)
    for glob in (*(selection.only or ()), *selection.never):
        if not any(map(glob.fits, names_left)) and not any(map(glob.may_fit_below, growing)):
            raise ValueError(f"{option}={glob.text!r} fits no name; {names.roots(names_left)}")
    for pattern, replacement in selection.rename:
        if not any(pattern.search(name) for name in names_left):
            raise ValueError(f"rename={pattern.pattern!r} is found in no name; {names.roots(names_left)}")
        names_left = [pattern.sub(replacement, name) for name in names_left]


def _unwrapped(stored: Mapping[str, Facts], chosen: Mapping[str, str], used: set[str]) -> dict[str, str]:
    """Wanted -> stored name for what matches only without the names of wrappers."""
    missing = [(name, target) for name, target in chosen.items() if target not in stored]
    if not missing:
        return {}
    bare: dict[str, list[str]] = {}
    for name in stored:
        if name not in used:
            bare.setdefault(names.strip_wrappers(name), []).append(name)
    return {name: same[0] for name, target in missing if len(same := bare.get(names.strip_wrappers(target), [])) == 1}


def _difference(stored: Facts, wanted: Facts) -> str:
    words = []
    if stored[1] != wanted[1]:
        words.append(f"shape {tuple(stored[1])} stored, {tuple(wanted[1])} asked for")
    if stored[0] != wanted[0]:
        words.append(f"type {stored[0]} stored, {wanted[0]} asked for")
    return "; ".join(words)


def _hint(match: Match) -> str:
    if match.wrapped:
        return "names differ by what a wrapper of the module adds: prefixes=True takes them as the same"
    if match.different:
        first = next(iter(match.different))
        return f"leave it out with only=['*', '!{first}'], or make the target as the stored state is"
    return "map names with rename=, choose some with only=, or accept what is there with strict=False"


def _sought(match: Match, name: str) -> str:
    return f"{name} (looked for as {match.renamed[name]})" if name in match.renamed else name


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = [f"    and {len(items) - _LISTED} more"] if len(items) > _LISTED else []
    return [f"  {title}:", *(f"    {item}" for item in items[:_LISTED]), *more]
