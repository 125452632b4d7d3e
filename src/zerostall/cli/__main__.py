"""`python -m zerostall.cli`: the same as the `zerostall` command."""

import sys

from zerostall.cli import main

sys.exit(main())
