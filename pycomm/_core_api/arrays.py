"""A uniform view of arrays: torch tensors, NumPy arrays and other objects that expose memory.

The core inspects contiguous tensors and NumPy arrays itself (csrc/bindings/core_arrays.cpp). This
module describes all others for it and reports the errors. For a collective, a non-contiguous tensor
or NumPy array is copied to a contiguous one and back. CuPy's, and those for kernels
(`as_array_ref`), are never copied and must be contiguous. torch and CuPy are recognised without
importing them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pycomm import _c10d, _core
from pycomm._arguments import refuse
from pycomm.errors import InvalidArgument, Unsupported

COMPLEX = "complex numbers are sent as pairs: pass torch.view_as_real(x), or x.view(float) in NumPy"
OVERLAP = (
    "elements of the array share memory (as after expand or broadcast_to), so the call cannot "
    "write to it: pass a copy (x.clone() or x.copy())"
)

# DLPack's device types. Host memory includes memory pinned for CUDA or ROCm.
HOST_DEVICES = (1, 3, 11)
DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA (managed)"}
DEVICES |= {14: "oneAPI", 15: "WebGPU", 16: "Hexagon"}

# torch's device type of CUDA devices. Tests set the name of emulated devices
# (device_groups.override_device_module).
torch_kind = "cuda"

# Bytes of an element by dtype: "float16" has 2; "bool", without a number, has 1.
BYTES = {name: int(name.strip("abdefilnotu") or 8) // 8 for name in _core.DTYPES}

# Caches: a lookup is faster than inspecting the type or dtype again.
_numpy_names: dict[Any, str] = {}
_torch_names: dict[Any, str] = {}


@dataclass(frozen=True)
class Device:
    """A memory location: kind "cpu" or "cuda", and the device index."""

    kind: str
    index: int

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


HOST = Device("cpu", 0)


@dataclass(slots=True)
class ArrayRef:
    """Contiguous elements for the core or a kernel to read or write.

    Attributes:
        pointer: address of the first element, on its device.
        dtype: a name of `_core.DTYPES`.
        count: elements.
        shape: the user's shape.
        device: the device of the elements.
        array: the object that owns the memory; keep it while the pointer is used.
        target: the user's array if `array` is a contiguous copy of it, else None. May be a list of
            the user's arrays; `array` is then a list of the slices to copy to them.
    """

    pointer: int
    dtype: str
    count: int
    shape: tuple[int, ...]
    device: Device
    array: Any
    target: Any = None

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return self.count * BYTES[self.dtype]

    @property
    def memory(self) -> tuple[int, str, int, Any]:
        """The description that `_core.Call` takes instead of an array."""
        return self.pointer, self.dtype, self.count, self.array

    def finish(self) -> None:
        """Copies the elements of a contiguous copy back to the user's array."""
        if self.target is not None:
            _copy(self.target, self.array)


class Like(Protocol):
    """The kind, dtype and device of new arrays: an ArrayRef, or several arrays of one kind."""

    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> Device: ...
    @property
    def array(self) -> Any: ...


NOT_CONTIGUOUS = "is not contiguous: pass a contiguous copy"


def as_array_ref(x: Any, name: str, *, write: bool = False) -> ArrayRef:
    """The elements of `x` in place; nothing is copied. Errors refer to `x` as `name`.

    Raises:
        InvalidArgument: not an array, or not contiguous; or `write` and read-only.
        Unsupported: kernels do not support the dtype, device or layout.
    """
    found = _inspect(x, write)
    if found is not None:
        return found
    try:
        if is_torch(x):
            return _torch_ref(x)
        if hasattr(x, "__cuda_array_interface__"):
            return _cuda_ref(x, write)
        array = _as_numpy(x, write)
        dtype = _numpy_names.get(array.dtype) or _numpy_name(array.dtype)
    except (InvalidArgument, Unsupported) as error:
        raise type(error)(f"{name}: {error}") from None
    if not array.flags.c_contiguous:
        raise InvalidArgument(f"{name} {NOT_CONTIGUOUS} (np.ascontiguousarray)")
    if write and not array.flags.writeable:
        raise InvalidArgument(f"{name} is read-only and the call would change it: pass a copy")
    return ArrayRef(_core.address(array), dtype, array.size, array.shape, HOST, x)


def _inspect(x: Any, write: bool) -> ArrayRef | None:
    """A contiguous tensor or NumPy array; None if `x` needs a closer look."""
    found = _core.inspect(x, write)
    if found is None and is_torch(x) and _can_read_tensors():
        found = _core.inspect(x, write)
    if found is None:
        return None
    pointer, dtype, count, shape, gpu = found
    return ArrayRef(pointer, dtype, count, shape, HOST if gpu < 0 else Device("cuda", gpu), x)


@functools.cache
def _can_read_tensors() -> bool:
    """Loads the module that reads tensors for the core, if one fits this torch."""
    with contextlib.suppress(Unsupported):  # without it, this module describes them, more slowly
        return bool(_c10d.load())
    return False


def new(like: Like, shape: tuple[int, ...], dtype: str, *, zeros: bool = False) -> Any:
    """A new array of the kind and on the device of `like`; `dtype` is a name of `_core.DTYPES`."""
    if is_torch(like.array):
        torch: Any = sys.modules["torch"]
        make = torch.zeros if zeros else torch.empty
        return make(shape, dtype=getattr(torch, dtype), device=like.array.device)
    library: Any = np
    if like.device.kind == "cuda":
        library = sys.modules.get("cupy")
        if library is None:
            raise Unsupported(
                "new CUDA arrays need CuPy: import cupy, or pass buffers for the results"
            )
        with library.cuda.Device(like.device.index):
            return (library.zeros if zeros else library.empty)(shape, dtype)
    # NumPy knows bfloat16 only through the dtype of the user's own array.
    known = like.array.dtype if like.dtype == dtype and hasattr(like.array, "dtype") else dtype
    try:
        return (np.zeros if zeros else np.empty)(shape, known)
    except TypeError:
        raise Unsupported(
            f"NumPy has no dtype {dtype}: pass a buffer for the result, or torch tensors"
        ) from None


def _torch_ref(x: Any) -> ArrayRef:
    dtype = check_tensor("x", x)
    if not x.is_contiguous() or x.is_neg():
        raise InvalidArgument(f"it {NOT_CONTIGUOUS} (x.contiguous())")
    device = HOST if x.is_cpu else Device("cuda", x.device.index)
    return ArrayRef(x.data_ptr(), dtype, x.numel(), tuple(x.shape), device, x)


def _cuda_ref(x: Any, write: bool) -> ArrayRef:
    """For CuPy's arrays and other objects with the CUDA array interface."""
    shown = x.__cuda_array_interface__
    dtype = np.dtype(shown["typestr"])
    pointer, read_only = shown["data"]
    if shown.get("strides") is not None and not x.flags.c_contiguous:
        raise InvalidArgument(f"it {NOT_CONTIGUOUS} (cupy.ascontiguousarray)")
    if write and read_only:
        raise InvalidArgument("it is read-only and the call would change it: pass a copy")
    count = int(np.prod(shown["shape"], dtype=np.int64))
    if not hasattr(x, "__dlpack_device__"):
        raise Unsupported(
            f"a {type(x).__name__} does not name its device (__dlpack_device__): wrap it"
        )
    device = Device("cuda", int(x.__dlpack_device__()[1]))
    name = _numpy_names.get(dtype) or _numpy_name(dtype)
    return ArrayRef(pointer or 0, name, count, tuple(shown["shape"]), device, x)


def view(x: Any, *, write: bool = False) -> ArrayRef:
    """A reference to `x`, of any shape and strides; `x` itself if it is an ArrayRef.

    With `write`, finish() copies the elements back into `x` if they were copied.

    Raises:
        InvalidArgument: not an array; `write` and read-only, or elements share memory.
        Unsupported: pycomm does not send the dtype, device or layout.
    """
    if isinstance(x, ArrayRef):
        return x
    found = _inspect(x, write)
    if found is not None:
        return found
    if is_torch(x):
        return _torch_view(x, write)
    if hasattr(x, "__cuda_array_interface__"):
        return as_array_ref(x, "the array", write=write)
    return _numpy_view(x, write)


def plain(x: Any) -> Any:
    """`x` as a torch tensor or a NumPy array on the same memory, for its shape and dtype."""
    if type(x) is np.ndarray or is_torch(x) or hasattr(x, "__cuda_array_interface__"):
        return x
    return _as_numpy(x, write=False)


def empty_like(x: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the kind, dtype and device of `x`, which is a result of plain()."""
    if is_torch(x):
        return sys.modules["torch"].empty(shape, dtype=x.dtype, device=x.device)
    if hasattr(x, "__cuda_array_interface__"):
        like = as_array_ref(x, "x")
        return new(like, shape, like.dtype)
    return np.empty(shape, x.dtype)


def parts(whole: Any, lengths: list[int]) -> list[Any]:
    """The first `lengths[0]` rows of the array, the next `lengths[1]`, and so on, as views."""
    if is_torch(whole):
        return list(whole.split(lengths))
    ends = list(itertools.accumulate(lengths))
    return [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def copied(one: ArrayRef) -> ArrayRef:
    """A copy of the elements in new memory; finish() does not copy it back."""
    copy = one.array.detach().clone() if is_torch(one.array) else one.array.copy()
    return as_array_ref(copy, "the array")


def is_torch(x: Any) -> bool:
    """Whether x is a torch tensor, without an import of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, list):  # of arrays, with a slice of the source for each
        for one, part in zip(target, source, strict=True):
            _copy(one if is_torch(one) else _as_numpy(one, write=True), part)
    elif isinstance(target, np.ndarray):
        np.copyto(target, source)
    else:
        target.detach().copy_(source)


def _as_numpy(x: Any, write: bool) -> Any:
    """A NumPy array on the memory of an object, without a copy."""
    if isinstance(x, np.generic) and not write:
        return np.asarray(x)
    if isinstance(x, np.ma.MaskedArray):
        raise InvalidArgument(
            "a masked array is not supported, because its mask is not sent: pass x.filled(...)"
        )
    if isinstance(x, np.ndarray):
        return x
    if not isinstance(x, np.generic):
        _refuse_devices(x)
        if hasattr(x, "__array_interface__"):
            return np.asarray(x)
        if hasattr(x, "__dlpack__"):
            return np.from_dlpack(x)
        with contextlib.suppress(TypeError):  # no buffer: raised below
            return np.asarray(memoryview(x))
    raise InvalidArgument(
        f"expected an array (torch tensor, NumPy array, buffer), got {type(x).__name__}"
    )


def _refuse_devices(x: Any) -> None:
    """Raises Unsupported for an array outside host memory, e.g. of CuPy, Numba or JAX."""
    number = x.__dlpack_device__()[0] if hasattr(x, "__dlpack_device__") else HOST_DEVICES[0]
    if number not in HOST_DEVICES:
        device = DEVICES.get(number, f"kind {int(number)}")
        raise Unsupported(
            f"a {type(x).__name__} in the memory of a device ({device}) is not supported: pass a "
            "copy in host memory, or a CUDA array with the __cuda_array_interface__, e.g. CuPy's"
        )


def _numpy_view(x: Any, write: bool) -> ArrayRef:
    if type(x) is not np.ndarray:
        x = _as_numpy(x, write)
    name = _numpy_names.get(x.dtype) or _numpy_name(x.dtype)
    flags = x.flags
    if write and not flags.writeable:
        raise InvalidArgument("the array is read-only and the call would change it: pass x.copy()")
    if flags.c_contiguous:
        return ArrayRef(_core.address(x), name, x.size, x.shape, HOST, x)
    if write and _may_overlap(x.shape, x.strides, x.itemsize):
        raise InvalidArgument(OVERLAP)
    array = np.ascontiguousarray(x)
    return ArrayRef(
        _core.address(array), name, array.size, x.shape, HOST, array, x if write else None
    )


def _numpy_name(dtype: Any) -> str:
    """Checks and caches the name of a NumPy dtype; raises Unsupported if pycomm does not send
    it."""
    if not dtype.isnative:
        raise Unsupported(
            f"dtype {dtype} is not in this machine's byte order: "
            "pass x.astype(x.dtype.newbyteorder('='))"
        )
    if dtype.kind == "c":
        raise Unsupported(f"dtype {dtype}: {COMPLEX}")
    if dtype.name not in _core.DTYPES:
        raise Unsupported(f"unsupported dtype {dtype}; supported: {', '.join(_core.DTYPES)}")
    _numpy_names[dtype] = dtype.name
    return str(dtype.name)


def _torch_view(x: Any, write: bool) -> ArrayRef:
    check_tensor("x", x)
    if x.is_contiguous() and not x.is_neg():
        return _torch_ref(x)
    if write and _may_overlap(x.shape, x.stride(), 1):
        raise InvalidArgument(OVERLAP)
    one = _torch_ref(x.detach().resolve_neg().contiguous())
    one.target = x if write else None
    return one


def on_gpu(x: Any) -> bool:
    """Whether a torch tensor is on a CUDA device."""
    return bool(x.device.type == torch_kind)


def check_tensor(name: str, x: Any) -> str:
    """Checks a torch tensor of any shape and strides; returns the name of its dtype.

    Raises:
        InvalidArgument: not a tensor, or its storage is too small.
        Unsupported: pycomm does not send the dtype, layout or device.
    """
    if not is_torch(x):
        refuse(name, x, "a torch tensor")
    dtype = _torch_name(x)
    if x.layout is not sys.modules["torch"].strided or not (x.is_cpu or on_gpu(x)):
        raise Unsupported(_why_not(x))
    _check_storage(x)
    return dtype


def in_host_memory(x: Any) -> Any:
    """A contiguous torch tensor with the elements of `x` in host memory; `x` itself if it is one.

    Raises:
        Unsupported: pycomm does not send the dtype, layout or device.
    """
    check_tensor("x", x)
    return x.detach().cpu().contiguous().resolve_neg()


def to_host(x: Any) -> Any:
    """A NumPy array with the elements of a NumPy array or torch tensor, copied only from a GPU."""
    return x.detach().cpu().numpy() if is_torch(x) else x


def from_host(x: Any, like: Like) -> Any:
    """The NumPy array itself for `like` in host memory; else a copy on the GPU of `like`, which is
    a torch tensor."""
    if like.device.kind == "cpu":
        return x
    return sys.modules["torch"].from_numpy(x).to(like.array.device)


def current_stream(index: int) -> Any:
    """torch's current stream on a CUDA device."""
    return getattr(sys.modules["torch"], torch_kind).current_stream(index)


def _torch_name(x: Any) -> str:
    """The name of the tensor's dtype.

    Raises:
        Unsupported: the tensor has no memory of its own, or pycomm does not send the dtype.
    """
    kind, dtype = type(x), x.dtype
    # A subclass with __torch_dispatch__, such as DTensor, stores its elements in other tensors.
    if kind.__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__:
        raise Unsupported(f"a {kind.__name__} has no memory of its own; pass the tensors inside it")
    if dtype in _torch_names:
        return _torch_names[dtype]
    name = str(dtype).removeprefix("torch.")
    if dtype.is_complex:
        raise Unsupported(f"dtype {dtype}: {COMPLEX}")
    if x.is_quantized:
        raise Unsupported(f"dtype {dtype}: quantized tensors are not supported; pass x.int_repr()")
    if name not in _core.DTYPES:
        raise Unsupported(f"unsupported dtype {dtype}; supported: {', '.join(_core.DTYPES)}")
    _torch_names[dtype] = name
    return name


def _check_storage(x: Any) -> None:
    """Raises InvalidArgument if the tensor has no memory, or its storage was resized to fewer bytes
    than it needs."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    needed = (x.storage_offset() + last + 1) * x.element_size()
    if x.numel() and x.untyped_storage().nbytes() < needed:
        raise InvalidArgument(
            f"a tensor that needs a storage of {needed} bytes has one of "
            f"{x.untyped_storage().nbytes()}"
        )
    if x.numel() and not x.data_ptr():
        raise InvalidArgument("a tensor without memory (torch._efficientzerotensor): pass a clone")


def _why_not(x: Any) -> str:
    if x.is_cpu:
        return f"tensors of layout {x.layout} are not supported; pass x.to_dense()"
    return f"tensors on device {x.device} are not supported; pass x.cpu()"


def _may_overlap(shape: Any, strides: Any, itemsize: int) -> bool:
    """Whether two elements may share memory; also true for a few rare layouts without overlap."""
    reach = 0  # bytes from the first element to the farthest one, over the dimensions so far
    for stride, length in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True)):
        if length > 1:
            if stride < reach + itemsize:
                return True
            reach += stride * (length - 1)
    return False
