"""`python -m mesotron` is the `mesotron` command."""

import sys

from mesotron.cli import main

if __name__ == "__main__":
    sys.exit(main())
