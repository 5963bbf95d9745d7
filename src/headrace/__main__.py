"""`python -m headrace`: the same as `headrace`."""

import sys

from headrace.cli import main

sys.exit(main())
