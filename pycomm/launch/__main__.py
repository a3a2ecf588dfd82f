"""`python -m pycomm.launch`: the same as `pycomm launch`."""

import sys

from pycomm.launch import command

if __name__ == "__main__":
    sys.exit(command.main(sys.argv[1:]))
