"""`python -m fuzz.run TARGET --seconds N`: coverage-guided fuzzing of one target with atheris.

Inputs that found new paths stay in the corpus folder, so that the next run goes on from there. A finding is written to
`--findings` and ends the process with a status other than 0.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["zerostall"], enable_loader_override=False):
    from fuzz.targets import TARGETS

_MOST = 64 << 10
_SLOW = 20
_MEMORY = 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, default=Path(tempfile.gettempdir()) / "zerostall-fuzz")
    parser.add_argument("--findings", type=Path, default=Path(tempfile.gettempdir()) / "zerostall-fuzz" / "findings")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    target = TARGETS[options.target]
    corpus = options.corpus / options.target
    corpus.mkdir(parents=True, exist_ok=True)
    options.findings.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    tokens = options.corpus / f"{options.target}.tokens"
    escaped = [token.replace("\\", "\\\\").replace('"', '\\"') for token in target.tokens]
    tokens.write_text("".join(f'"{token}"\n' for token in escaped))
    arguments = [
        f"-max_total_time={options.seconds}",
        f"-max_len={_MOST}",
        f"-timeout={_SLOW}",
        f"-rss_limit_mb={_MEMORY}",
        f"-artifact_prefix={options.findings / options.target}-",
        "-print_final_stats=1",
        *([f"-dict={tokens}"] if escaped else []),
    ]
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
