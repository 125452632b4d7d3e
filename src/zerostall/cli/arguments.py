"""Arguments and options that several commands have."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from zerostall.flow import catalog
from zerostall.tiers.files import real
from zerostall.tiers.urls import is_url

NEWEST = "newest"


def step_or_newest(text: str) -> int | None:
    """A step's number; None for the newest clean one."""
    if text == NEWEST:
        return None
    if not re.fullmatch("[0-9]{1,19}", text):
        raise typer.BadParameter(f"{text!r} is neither a number of steps nor {NEWEST!r}")
    return int(text)


Where = Annotated[str, typer.Argument(help="the run's folder, or a URL such as s3://bucket/run", show_default=False)]
OneRun = Annotated[str | None, typer.Argument(metavar="RUN", help="a run's folder or URL", show_default="all of them")]
NamedStep = Annotated[str, typer.Argument(metavar="STEP", help="which step, or newest", show_default=False)]
NewestStep = Annotated[
    int | None,
    typer.Argument(metavar="STEP", parser=step_or_newest, help="which step, or newest", show_default="newest"),
]
AnyStep = Annotated[
    str | None, typer.Argument(metavar="STEP", help="which step, or newest", show_default="all of them")
]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="GLOB", help="names, such as 'model.*'; repeatable")]
Rename = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="OLD=NEW", help="regular expression and what takes its place; repeatable"),
]
CastTo = Annotated[
    str | None,
    typer.Option("--dtype", metavar="TYPE", help="cast floating point to this: bfloat16", show_default="as it is"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document instead of text")]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def step_there(where: str, text: str) -> int:
    """A step's number, of the newest clean one where that is asked for."""
    step = step_or_newest(text)
    return catalog.newest(where) if step is None else step


def place(where: str) -> str:
    """What answers call a run: its URL, or its folder's whole path."""
    return where if is_url(where) else str(real(where))


def nbytes(text: str) -> int:
    """A number of bytes: `5GB`, `512MiB`, `1000000`."""
    match = re.fullmatch(r"([0-9]+)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no number of bytes, such as 2GB or 512MiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def renames(given: list[str] | None) -> dict[str, str]:
    """`OLD=NEW` of each `--rename`; a `=` in an expression is written `[=]`."""
    pairs = [text.partition("=") for text in given or ()]
    if any(not sign for _, sign, _ in pairs):
        raise typer.BadParameter("--rename takes OLD=NEW: a regular expression, =, and what takes its place")
    return {old.replace("[=]", "="): new for old, _, new in pairs}
