"""The Python examples of README.md run as they stand, and its numbers are those of benchmarks/results/."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.readme import BEGIN, END, measured

README = Path(__file__).parents[2] / "README.md"
BEFORE = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
num_steps = 3

def train_one_step(step):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_python_examples_run(tmp_path: Path, agent_environment: dict[str, str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    code = "\n".join([BEFORE, *blocks, "assert ckpt.stats.saves >= 1"])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=agent_environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/gpt/step-*/manifest.json"))  # steps as short as these may overtake a save


def test_the_table_is_the_measured_one() -> None:
    between = README.read_text().split(BEGIN)[1].split(END)[0]
    assert between.strip() == measured().strip()
