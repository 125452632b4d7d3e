"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Where = Annotated[Path, typer.Argument(help="the run's folder", show_default=False)]
Step = Annotated[int, typer.Argument(help="number of finished training steps", min=0, show_default=False)]
NewestStep = Annotated[int | None, typer.Argument(help="which step", min=0, show_default="the newest clean one")]
AnyStep = Annotated[int | None, typer.Argument(help="which step", min=0, show_default="all")]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="GLOB", help="names, such as 'model.*'; repeatable")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document instead of text")]
