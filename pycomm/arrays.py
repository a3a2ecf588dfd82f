"""One view of every kind of array: torch tensors, NumPy arrays, anything with host memory to show.

A view is validated here, once: what the core gets is a pointer to contiguous elements of a dtype
that it knows. For a collective, an array in host memory that is not contiguous is copied into one
that is, and copied back afterwards; on a device, and for a kernel (`as_array_ref`), arrays are
taken as they lie, and have to be contiguous. torch and CuPy are recognised without importing them.
Called by collectives.py and the package kernels.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pycomm import _core
from pycomm.errors import InvalidArgument, Unsupported

__all__ = [
    "ArrayRef",
    "Device",
    "Like",
    "View",
    "as_array_ref",
    "copied",
    "current_stream",
    "empty_like",
    "in_host_memory",
    "new",
    "on_gpu",
    "parts",
    "plain",
    "view",
]

COMPLEX = "complex numbers travel as pairs: pass torch.view_as_real(x), or x.view(float) in NumPy"
OVERLAP = (
    "elements of the array share memory (as after expand or broadcast_to), so the call cannot "
    "write to it: pass a copy (x.clone() or x.copy())"
)

# DLPack's numbers of devices. Host memory, also that pinned for CUDA or ROCm, is for the processor.
HOST_DEVICES = (1, 3, 11)
DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA (managed)"}
DEVICES |= {14: "oneAPI", 15: "WebGPU", 16: "Hexagon"}

# What torch calls CUDA devices. Tests put the name of emulated ones here
# (device_groups.override_device_module).
torch_kind = "cuda"

# Of an element, by dtype: "float16" has 2, and "bool", without a number, 1.
BYTES = {name: int(name.strip("abdefilnotu") or 8) // 8 for name in _core.DTYPES}

# What has been seen so far: a look-up is faster than asking again.
_numpy_names: dict[Any, str] = {}
_torch_names: dict[Any, str] = {}
_torch: dict[str, Any] = {}  # what is needed of the module
_viewers: dict[type, Callable[[Any, bool], View]] = {}


class View:
    """Contiguous elements that the core may read, and write if asked for.

    Attributes:
        pointer: address of the first element.
        dtype: a name of `_core.DTYPES`.
        count: elements.
        array: what owns the memory; keep it while the core uses the pointer.
        target: the user's array, if `array` is a contiguous stand-in for it, else None. Or lists:
            arrays of the user's, and the parts of the memory that go there.
        device: where the elements lie.
    """

    __slots__ = ("array", "count", "device", "dtype", "pointer", "target")

    def __init__(
        self,
        pointer: int,
        dtype: str,
        count: int,
        array: Any,
        target: Any = None,
        device: Device | None = None,
    ) -> None:
        self.device = device or HOST
        self.pointer = pointer
        self.dtype = dtype
        self.count = count
        self.array = array
        self.target = target

    def finish(self) -> None:
        """Copies the stand-in's elements to the user's array."""
        if self.target is not None:
            _copy(self.target, self.array)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.count * BYTES[self.dtype]


@dataclass(frozen=True)
class Device:
    """Where memory lies: kind "cpu" or "cuda", and which of them."""

    kind: str
    index: int

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


HOST = Device("cpu", 0)


@dataclass(slots=True)
class ArrayRef:
    """Contiguous elements where they lie, on any device, for a kernel to read or write.

    Attributes:
        pointer: address of the first element, on its device.
        dtype: a name of `_core.DTYPES`.
        count: elements.
        shape: as the user sees them.
        nbytes: bytes of the elements.
        device: where they are.
        array: the user's array.
    """

    pointer: int
    dtype: str
    count: int
    shape: tuple[int, ...]
    nbytes: int
    device: Device
    array: Any


class Like(Protocol):
    """What new arrays are made after: ArrayRef, or several arrays of one kind."""

    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> Device: ...
    @property
    def array(self) -> Any: ...


NOT_CONTIGUOUS = "is not contiguous, and is taken as it lies: pass a contiguous one"


def as_array_ref(x: Any, name: str, *, write: bool = False) -> ArrayRef:
    """The elements of `x`, which is called `name` in errors; nothing is ever copied.

    Raises:
        InvalidArgument: not an array, or not contiguous; `write` and read-only.
        Unsupported: a dtype, device or layout that kernels do not take.
    """
    try:
        if _is_torch(x):
            return _locate_torch(x, name)
        if hasattr(x, "__cuda_array_interface__"):
            return _locate_cuda(x, name, write)
        array = _as_numpy(x, write)
        v = _numpy_names.get(array.dtype) or _learn_numpy(array.dtype)
    except (InvalidArgument, Unsupported) as error:
        raise type(error)(f"{name}: {error}") from None
    if not array.flags.c_contiguous:
        raise InvalidArgument(f"{name} {NOT_CONTIGUOUS} (np.ascontiguousarray)")
    if write and not array.flags.writeable:
        raise InvalidArgument(f"{name} is read-only and the call would change it: pass a copy")
    pointer = _core.address(array)
    return ArrayRef(pointer, v, array.size, array.shape, array.nbytes, HOST, x)


def new(like: Like, shape: tuple[int, ...], dtype: str, *, zeros: bool = False) -> Any:
    """A new array of the kind and on the device of `like`, of a dtype by name."""
    if _is_torch(like.array):
        torch: Any = sys.modules["torch"]
        make = torch.zeros if zeros else torch.empty
        return make(shape, dtype=getattr(torch, dtype), device=like.array.device)
    library: Any = np
    if like.device.kind == "cuda":
        library = sys.modules.get("cupy")
        if library is None:
            raise Unsupported("new arrays beside these need CuPy: pass buffers for the results")
        with library.cuda.Device(like.device.index):
            return (library.zeros if zeros else library.empty)(shape, dtype)
    # bfloat16 is known to NumPy where the user's own array brought it along.
    known = like.array.dtype if like.dtype == dtype and hasattr(like.array, "dtype") else dtype
    try:
        return (np.zeros if zeros else np.empty)(shape, known)
    except TypeError:
        raise Unsupported(
            f"NumPy knows no {dtype} here: pass a buffer for the result, or torch tensors"
        ) from None


def _locate_torch(x: Any, name: str) -> ArrayRef:
    _viewers.get(type(x)) or _learn_kind(x)
    dtype = _torch_names.get(x.dtype) or _learn_torch(x)
    if x.layout is not _torch["strided"] or not (x.is_cpu or on_gpu(x)):
        raise Unsupported(_why_not(x))
    if not x.is_contiguous() or x.is_neg():
        raise InvalidArgument(f"it {NOT_CONTIGUOUS} (x.contiguous())")
    device = HOST if x.is_cpu else Device("cuda", x.device.index)
    count = x.numel()
    return ArrayRef(x.data_ptr(), dtype, count, tuple(x.shape), count * x.element_size(), device, x)


def _locate_cuda(x: Any, name: str, write: bool) -> ArrayRef:
    """CuPy's arrays, and others that show themselves as it does."""
    shown = x.__cuda_array_interface__
    dtype = np.dtype(shown["typestr"])
    pointer, read_only = shown["data"]
    if shown.get("strides") is not None and not x.flags.c_contiguous:
        raise InvalidArgument(f"it {NOT_CONTIGUOUS} (cupy.ascontiguousarray)")
    if write and read_only:
        raise InvalidArgument("it is read-only and the call would change it: pass a copy")
    count = int(np.prod(shown["shape"], dtype=np.int64))
    if not hasattr(x, "__dlpack_device__"):
        raise Unsupported(f"a {type(x).__name__} does not say on which device it lies: wrap it")
    device = Device("cuda", int(x.__dlpack_device__()[1]))
    learnt = _numpy_names.get(dtype) or _learn_numpy(dtype)
    return ArrayRef(
        pointer or 0, learnt, count, tuple(shown["shape"]), count * dtype.itemsize, device, x
    )


def view(x: Any, *, write: bool = False) -> View:
    """The view of `x`, of any shape and strides.

    With `write`, the elements come back into `x` at `finish()`.

    Raises:
        InvalidArgument: not an array; `write` and read-only, or elements share memory.
        Unsupported: a dtype, device or layout that does not travel.
    """
    viewer = _viewers.get(type(x)) or _learn_kind(x)
    return viewer(x, write)


def plain(x: Any) -> Any:
    """`x` as a torch tensor or a NumPy array on the same memory, for its shape and dtype."""
    if type(x) is np.ndarray or _is_torch(x) or hasattr(x, "__cuda_array_interface__"):
        return x
    return _as_numpy(x, write=False)


def empty_like(x: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the kind, dtype and device of `x`, which plain() has given."""
    if _is_torch(x):
        return sys.modules["torch"].empty(shape, dtype=x.dtype, device=x.device)
    if hasattr(x, "__cuda_array_interface__"):
        like = as_array_ref(x, "x")
        return new(like, shape, like.dtype)
    return np.empty(shape, x.dtype)


def parts(whole: Any, lengths: list[int]) -> list[Any]:
    """The array's first `lengths[0]` rows, the next `lengths[1]`, and so on, on its memory."""
    if _is_torch(whole):
        return list(whole.split(lengths))
    ends = list(itertools.accumulate(lengths))
    return [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def copied(one: View) -> View:
    """The same elements in memory of their own, not to be copied back."""
    if _is_torch(one.array):
        array = one.array.detach().clone()
        return View(array.data_ptr(), one.dtype, one.count, array, device=one.device)
    array = one.array.copy()
    if one.device.kind != "cpu":
        return _device_view(array, False)
    return View(_core.address(array), one.dtype, one.count, array)


def _learn_kind(x: Any) -> Callable[[Any, bool], View]:
    """What makes views of arrays of the type of `x`, not seen so far."""
    kind = type(x)
    if not _is_torch(x) and hasattr(x, "__cuda_array_interface__"):
        _viewers[kind] = _device_view
        return _device_view
    if not _is_torch(x):
        _viewers[kind] = _numpy_view
        return _numpy_view
    torch: Any = sys.modules["torch"]
    # A subclass that dispatches by itself holds its elements elsewhere, as a DTensor does.
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise Unsupported(f"a {kind.__name__} has no memory of its own; pass the tensors inside it")
    _torch.update(strided=torch.strided, contiguous_format=torch.contiguous_format)
    _viewers[kind] = _torch_view
    return _torch_view


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, list):  # of arrays, with a part of the source for each
        for one, part in zip(target, source, strict=True):
            _copy(one if _is_torch(one) else _as_numpy(one, write=True), part)
    elif isinstance(target, np.ndarray):
        np.copyto(target, source)
    else:
        target.detach().copy_(source)


def _as_numpy(x: Any, write: bool) -> Any:
    """Memory of an object that NumPy can see without copying it."""
    if isinstance(x, np.generic) and not write:
        return np.asarray(x)
    if isinstance(x, np.ndarray):
        return x
    if not isinstance(x, np.generic):
        _refuse_devices(x)
        if hasattr(x, "__array_interface__"):
            return np.asarray(x)
        if hasattr(x, "__dlpack__"):
            return np.from_dlpack(x)
        with contextlib.suppress(TypeError):
            return np.asarray(memoryview(x))
    raise InvalidArgument(
        f"expected an array (torch tensor, NumPy array, buffer), not {type(x).__name__}"
    )


def _refuse_devices(x: Any) -> None:
    """Raises Unsupported for an array outside host memory, as CuPy's, Numba's and JAX's may be."""
    number = x.__dlpack_device__()[0] if hasattr(x, "__dlpack_device__") else HOST_DEVICES[0]
    if number not in HOST_DEVICES:
        device = DEVICES.get(number, f"kind {int(number)}")
        raise Unsupported(
            f"a {type(x).__name__} in the memory of a device ({device}) is not supported: pass a "
            "copy in host memory, or a CUDA array with the __cuda_array_interface__, as CuPy's"
        )


def _numpy_view(x: Any, write: bool) -> View:
    if type(x) is not np.ndarray:
        x = _as_numpy(x, write)
    name = _numpy_names.get(x.dtype) or _learn_numpy(x.dtype)
    flags = x.flags
    if write and not flags.writeable:
        raise InvalidArgument("the array is read-only and the call would change it: pass x.copy()")
    if flags.c_contiguous:
        return View(_core.address(x), name, x.size, x)
    if write and _may_overlap(x.shape, x.strides, x.itemsize):
        raise InvalidArgument(OVERLAP)
    array = np.ascontiguousarray(x)
    return View(_core.address(array), name, array.size, array, x if write else None)


def _learn_numpy(dtype: Any) -> str:
    """The name of a NumPy dtype not seen so far; raises Unsupported for what does not travel."""
    if not dtype.isnative:
        raise Unsupported(
            f"dtype {dtype} is not in this machine's byte order: "
            "pass x.astype(x.dtype.newbyteorder('='))"
        )
    if dtype.kind == "c":
        raise Unsupported(f"dtype {dtype}: {COMPLEX}")
    if dtype.name not in _core.DTYPES:
        raise Unsupported(f"dtype {dtype} does not travel; these do: {', '.join(_core.DTYPES)}")
    _numpy_names[dtype] = dtype.name
    return str(dtype.name)


def _device_view(x: Any, write: bool) -> View:
    found = as_array_ref(x, "the array", write=write)
    return View(found.pointer, found.dtype, found.count, x, device=found.device)


def _torch_view(x: Any, write: bool) -> View:
    name = _torch_names.get(x.dtype) or _learn_torch(x)
    if not x.is_cpu or x.layout is not _torch["strided"]:
        if on_gpu(x):
            return _device_view(x, write)
        raise Unsupported(_why_not(x))
    if x.is_contiguous() and not x.is_neg():
        return View(x.data_ptr(), name, x.numel(), x)
    if write and _may_overlap(x.shape, x.stride(), 1):
        raise InvalidArgument(OVERLAP)
    array = x.detach().resolve_neg().clone(memory_format=_torch["contiguous_format"])
    return View(array.data_ptr(), name, array.numel(), array, x if write else None)


def on_gpu(x: Any) -> bool:
    """Whether a torch tensor lies on a CUDA device."""
    return bool(x.device.type == torch_kind)


def in_host_memory(x: Any) -> Any:
    """A contiguous torch tensor of the same elements in host memory: `x` itself where it is one.

    Raises:
        Unsupported: a dtype, layout or device that pycomm does not send.
    """
    if x.dtype not in _torch_names:
        _learn_torch(x)
    if x.layout is not sys.modules["torch"].strided or not (x.is_cpu or on_gpu(x)):
        raise Unsupported(_why_not(x))
    return x.detach().cpu().contiguous().resolve_neg()


def current_stream(index: int) -> Any:
    """torch's current stream on a CUDA device."""
    return getattr(sys.modules["torch"], torch_kind).current_stream(index)


def _learn_torch(x: Any) -> str:
    """The name of a torch dtype not seen so far; raises Unsupported for what does not travel."""
    dtype, name = x.dtype, str(x.dtype).removeprefix("torch.")
    if dtype.is_complex:
        raise Unsupported(f"dtype {dtype}: {COMPLEX}")
    if x.is_quantized:
        raise Unsupported(f"dtype {dtype}: quantized tensors do not travel; pass x.int_repr()")
    if name not in _core.DTYPES:
        raise Unsupported(f"dtype {dtype} does not travel; these do: {', '.join(_core.DTYPES)}")
    _torch_names[dtype] = name
    return name


def _why_not(x: Any) -> str:
    if x.is_cpu:
        return f"tensors of layout {x.layout} do not travel; pass x.to_dense()"
    return f"tensors on device {x.device} are not supported here; pass x.cpu()"


def _may_overlap(shape: Any, strides: Any, itemsize: int) -> bool:
    """Whether two elements may share memory; a few odd layouts that do not are refused too."""
    reach = 0  # from the first byte of an element to the first of the farthest, so far
    for stride, length in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True)):
        if length > 1:
            if stride < reach + itemsize:
                return True
            reach += stride * (length - 1)
    return False
