"""The entry point that torch calls at the end of `import torch`, which it must not fail.

It is outside the package: to load an entry point torch imports the packages that contain it, and a
pycomm that cannot be imported would make `import torch` fail.
"""

import logging


def register(_torch: object = None) -> None:
    """Imports the module, which registers the backend and reads PYCOMM_REPLACE. Logs a warning with
    the reason if that fails."""
    log = logging.getLogger("pycomm")
    try:
        import pycomm

        if "all_reduce" not in dir(pycomm):
            raise ImportError(
                f"{pycomm.__file__} is another library with the same import name: run `pip "
                "uninstall pycomm`, then `pip install --force-reinstall --no-deps "
                "pycomm-collectives`"
            )
        from pycomm import torch_backend  # noqa: F401 - registers the backend
    except Exception as error:  # of any kind, such as a pycomm for another Python
        log.warning(
            'torch.distributed has no backend "pycomm", since pycomm cannot be imported: %s', error
        )
