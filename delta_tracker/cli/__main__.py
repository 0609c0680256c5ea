"""Run ``delta-tracker`` as ``python -m delta_tracker.cli``."""

import sys

from delta_tracker.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
