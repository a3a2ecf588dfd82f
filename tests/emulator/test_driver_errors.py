"""Messages for errors of the CUDA installation: the real runtime over a stub of the driver.

Each process loads a libcuda.so.1 that answers with one version and one result of cuInit. What needs
kernels has the emulator.
"""

import os
import subprocess
import sys

import programs
import pytest
from finished import finished

pytestmark = [
    pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc"),
    pytest.mark.timeout(120),
]

# The runtime refuses a driver that lacks a function. What is not defined here fails: it is reached
# only after a successful cuInit.
DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int cuInit(unsigned flags) { return RESULT; }
static int fails(void) { return 999; }
int cuGetProcAddress_v2(const char* name, void** found, int version, unsigned long long flags,
                        int* status) {
  Dl_info self;
  dladdr((void*)cuInit, &self);
  *found = dlsym(dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD), name);
  if (*found == 0) *found = (void*)fails;
  if (status != 0) *status = 0;
  return 0;
}
int cuGetProcAddress(const char* name, void** found, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, found, version, flags, 0);
}
"""
OPEN = """
from pycomm import _core, _cuda  # _core registers the types of errors
try:
    _cuda.open_device(0)
except Exception as error:  # the test reads its text
    print(f"{type(error).__name__}: {error}")
print(_cuda.why_not())
"""
NO_GPU = "CUDA arrays need NVIDIA's driver and a GPU"


def messages(folder):
    """What open_device raises and why_not returns, with the libcuda.so.1 of this folder, if any."""
    done = finished(
        [sys.executable, "-c", OPEN],
        check=True,
        timeout=60,
        cwd=programs.ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
    )
    return done.stdout.splitlines()


def make_driver(folder, version, result):
    file = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", file]
    defines = [f"-DVERSION={version}", f"-DRESULT={result}"]
    subprocess.run([*command, *defines, "-ldl"], input=DRIVER, text=True, check=True)


@pytest.mark.parametrize(
    ("version", "result", "remedy"),
    [
        (12040, 0, "NVIDIA's driver supports CUDA 12.4, and pycomm._cuda was built with CUDA "),
        (13090, 100, NO_GPU),
        (13090, 46, "another process uses the GPU, and its compute mode allows one: "),
        (13090, 802, "with NVSwitch, start nvidia-fabricmanager"),
        (13090, 803, "NVIDIA's kernel module and libcuda.so.1 have different versions: "),
    ],
    ids=["old driver", "no device", "in use", "not ready", "mismatch"],
)
def test_the_message_names_the_remedy(tmp_path, version, result, remedy):
    make_driver(tmp_path, version, result)
    raised, why = messages(tmp_path)
    assert raised.startswith("Unsupported: cudaGetDeviceCount: ")
    assert remedy in raised
    assert remedy in why


def test_an_error_without_a_remedy_is_internal(tmp_path):
    make_driver(tmp_path, 13090, 999)
    raised, why = messages(tmp_path)
    assert raised == f"InternalError: cudaGetDeviceCount: {why}"


@pytest.mark.skipif(
    os.path.exists("/proc/driver/nvidia/version"), reason="needs a machine without the driver"
)
def test_a_missing_driver_is_named(tmp_path):
    """The runtime reports it as an old driver."""
    raised, why = messages(tmp_path)
    assert raised.endswith(NO_GPU)
    assert why.endswith(NO_GPU)


def test_a_build_without_kernels_for_the_gpu_is_named():
    module = programs.emulated()
    assert module.why_not() == ""
    module.set_no_image(True)
    try:
        assert "pycomm._cuda was built for other GPUs" in module.why_not()
    finally:
        module.set_no_image(False)
