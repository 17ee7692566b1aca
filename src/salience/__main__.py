"""`python -m salience`, the same as `salience`."""

import sys

from salience.cli import main

if __name__ == "__main__":
    sys.exit(main())
