"""The version of the distribution."""

import importlib.metadata

__version__ = importlib.metadata.version("pycomm-collectives")
