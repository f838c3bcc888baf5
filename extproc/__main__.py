"""`python -m extproc` is the command `kvsteer`."""

import sys

from extproc.cli import main

sys.exit(main())
