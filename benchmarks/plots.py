"""The plots. matplotlib is needed only here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from benchmarks.loop_time import Samples

TITLES = {
    "dcp": "DCP async_save",
    "dcp-stager": "DCP, asynchronous stager",
    "overlap": "zerostall, overlap",
    "freeze": "zerostall, freeze",
}
WITHOUT, WITH = "#8a8f98", "#d6336c"


def step_times(found: list[Samples], target: Path) -> None:
    """Step times with and without saves, a panel a system, on one scale."""
    shown = [one for one in found if one.peer != "none"] or found
    figure, panels = pyplot.subplots(
        1, len(shown), figsize=(2.6 * len(shown) + 0.8, 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, one in zip(panels[0], shown, strict=True):
        for times, color, label in ((one.bare, WITHOUT, "without"), (one.saved, WITH, "with saves")):
            ordered = sorted(x * 1e3 for x in times)
            panel.plot([100 * (i + 0.5) / len(ordered) for i in range(len(ordered))], ordered, color=color, label=label)
        panel.set_title(TITLES.get(one.peer, one.peer), fontsize=9)
        panel.set_xlabel("percentile of steps", fontsize=8)
        panel.set_yscale("log")
        for axis in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
            axis(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.tick_params(axis="y", which="both", labelsize=8)
        panel.grid(visible=True, which="both", alpha=0.2)
    panels[0][0].set_ylabel("step time, ms", fontsize=8)
    panels[0][0].legend(fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
