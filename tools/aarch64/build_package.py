"""Runs setup.py without nvcc, whose objects are for the machine that compiles: see run.py."""

import setuptools

run_setup, setuptools.setup = setuptools.setup, lambda **arguments: None
import setup  # noqa: E402 - calls setuptools.setup when it is imported

setup.nvcc = lambda: None
run_setup(ext_modules=setup.extensions(), cmdclass={"build_ext": setup.NinjaBuild})
