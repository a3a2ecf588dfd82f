"""The compiled engine. Private: use the functions of `pycomm`."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

OPERATIONS: tuple[str, ...]
DTYPES: tuple[str, ...]
REDUCE_OPS: tuple[str, ...]
ALGORITHMS: tuple[str, ...]
compiler: str

def address(array: Any, /) -> int: ...

class SharedMemory:
    """Memory that the ranks of this host share, as a writable buffer."""

    def __init__(self, nbytes: int, /) -> None: ...

def reduce_op_name(op: Any) -> str:
    """The name in REDUCE_OPS of an op as pycomm.all_reduce takes it."""

def set_call_fallback(run: Callable[..., Any]) -> None:
    """The Python function that Call.__call__ calls for all calls that the core does not run
    itself: run(group, call, input, output, result, async_op)."""

def set_work_type(work: type[Work]) -> None:
    """pycomm.Work, which the core makes."""

def set_profiler(profiler: ModuleType) -> None:
    """The module whose `_is_profiler_enabled` passes all calls to the fallback."""

def set_default_group(group: Group | None) -> None:
    """The handle that Call.__call__ uses for None; the caller keeps it. None: the fallback."""

def set_tensor_reader(reader: object, /) -> None: ...
def inspect(array: Any, write: bool, /) -> tuple[int, str, int, tuple[int, ...], int] | None:
    """The address, dtype, count and shape of a contiguous tensor or NumPy array, and the number of
    its GPU or -1. None for all other arrays, and for a read-only one if `write`."""

class Call:
    """A call without its arrays. None keeps the default of `timeout_s`, `algorithm`, `counts`.

    `tag`: of a message; of all_reduce, all_gather and all_to_all: what the array is, the same on
    all ranks: the number of a pass, times 2**16, plus a hash of parameters. 0: not known.
    `peer`: the root, or the other rank of a message; -1: recv takes a message of any rank.
    `counts`, elements: all_gather: of each rank's input; all_to_all: sent to each rank, then
    received from each. `counts_fit`: the ranks exchanged these counts, so the call does not compare
    them. `timeout_s` is 0 for the group's."""

    def __init__(
        self,
        operation: str,
        /,
        *,
        timeout_s: float | None = None,
        op: Any = "sum",
        peer: int = 0,
        tag: int = 0,
        algorithm: str | None = None,
        counts: Sequence[int] | None = None,
        counts_fit: bool = False,
    ) -> None: ...
    @property
    def operation(self) -> str: ...
    @property
    def timeout_s(self) -> float: ...
    def __call__(self, group: Any, input: Any, output: Any, result: Any, async_op: bool, /) -> Any:
        """Runs the call in a pycomm.Group, None: the default group, and returns `result`. Any other
        call, for example on arrays on a device, is passed to the function of
        set_call_fallback()."""
    def run_rows(self, group: Any, x: Any, out: Any, /) -> bool:
        """Runs a call with a row for each rank in `x` or `out`. False, and nothing happens, unless
        they are contiguous in host memory, fit each other and overlap in this rank's row alone."""
    # An array is None, a contiguous tensor or NumPy array in host memory, or the description of any
    # array: (address, dtype, count, owner). `stream`: the caller's, for a device group.
    def run(self, group: Collectives, input: Any, output: Any, stream: int = 0, /) -> bool:
        """Runs the call. False, and nothing happens, if an array needs a description."""
    def start(
        self,
        group: Collectives,
        input: Any,
        output: Any,
        stream: int | None,
        result: Any,
        written: Any,
        array: Any,
        /,
    ) -> Any:
        """Like run(), on the group's worker; keeps the arrays alive until the call is complete.
        Returns a pycomm.Work of the result and of what its wait() needs: a reference to an array
        that is not contiguous, and to one on a device. None if an array needs a description, which
        comes with a stream."""

def rows(lists: tuple[list[Any], ...], /) -> tuple[Any, Any, tuple[str, ...], int, bool] | None:
    """Describes lists of equal length of contiguous arrays, in host memory or on one GPU: uint64
    [rows, lists + 1], addresses and elements per array of each row; uint64 [lists, rows, 2],
    addresses and bytes; the dtype of each list; the GPU's number, or -1; and whether all arrays
    have one dimension. None if arrays of a row differ in number of elements or, unless flat, in
    shape, those of a list differ in dtype, or an array has more than 2^31 - 1 elements."""

def share_memory(written: Sequence[tuple[int, int]], read: Sequence[tuple[int, int]], /) -> bool:
    """Whether written memory overlaps other memory, in tables of (address, bytes)."""

# The CPU kernels of csrc/kernels/device_kernels.h, with arguments as csrc/bindings/kernels.h says.
kernels: Any

def read_packet_header(address: int, nbytes: int, /) -> tuple[int, int, str, str]: ...
def most_compact_bytes(
    lengths: Sequence[int],
    counts: Sequence[int],
    group: int,
    index_code: str,
    value_code: str,
    /,
) -> list[int]: ...
def read_compact_header(address: int, nbytes: int, size: int, /) -> tuple[int, int]: ...
def read_group_indices(packets: tuple[int, int], group: int, indices: int, /) -> None: ...
def decode_group_sum(
    out: tuple[int, int], dtype: str, group: int, packets: tuple[int, int], scale: float, /
) -> None: ...
def decode_group_update(
    param: tuple[int, int],
    dtype: str,
    group: int,
    packets: tuple[int, int],
    lr: float,
    scale: float,
    /,
) -> None: ...
def quantized_bytes(blocks: tuple[int, int], bits: int, /) -> int: ...
def set_kernel_threads(threads: int, /) -> None: ...
def kernel_threads() -> int: ...
def set_kernel_isa(name: str, /) -> None: ...
def kernel_isa() -> str: ...

class Store(Protocol):
    """A rendezvous store, of the core or implemented in Python; csrc/rendezvous/store.h documents
    the methods."""

    def set(self, key: str, value: bytes, timeout_s: float = ..., /) -> None: ...
    def get(self, key: str, timeout_s: float, /) -> bytes: ...
    def add(self, key: str, amount: int, timeout_s: float = ..., /) -> int: ...
    def remove(self, key: str, timeout_s: float = ..., /) -> bytes | None: ...
    def claim(self, key: str, value: bytes, timeout_s: float = ..., /) -> bytes: ...
    def all_ranks_connected(self) -> None: ...

class LocalStore(Store):
    def __init__(self) -> None: ...

class TcpStore(Store):
    @staticmethod
    def serve(host: str, port: int, secret: str, /) -> TcpStore: ...
    @staticmethod
    def connect(host: str, port: int, secret: str, timeout_s: float, /) -> TcpStore: ...
    @property
    def port(self) -> int: ...

class Stats:
    """Totals of a rank. `bytes` equals `bytes_written`, which includes frame headers.

    `algorithm`: the default algorithm of a device group, "nccl" or "host_staged";
    otherwise "auto"."""

    calls: int
    frames_sent: int
    bytes_sent: int
    bytes_written: int
    bytes_received: int
    bytes: int
    seconds: float
    algorithm: str

class Member:
    """The identity of a rank. `transport`: from this rank to it. `visible`: whether `pid` is valid
    here. `started`: start time of its process, field 22 of /proc/PID/stat; 0:
    unknown."""

    host: str
    pid: int
    transport: str
    visible: bool
    started: int

class Work:
    """A call that was started: the base of pycomm.Work, of which the core makes objects."""

    _result: Any
    _written: Any
    _array: Any
    def done(self) -> bool: ...
    def wait_for_call(self, limit_s: float, /) -> None: ...
    def make_stream_wait(self, stream: int, /) -> None:
        """Device calls, after wait(): later work on `stream` begins after the call."""
    @property
    def source(self) -> int | None:
        """The sender for a recv; None for another call, or before it is complete."""

class Collectives:
    """The methods that groups for arrays in host memory and on devices share."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def members(self) -> list[Member]: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def host_count(self) -> int: ...
    @property
    def encrypted(self) -> bool: ...
    @property
    def thread_multiple(self) -> bool: ...
    @property
    def hosts(self) -> list[int]:
        """By rank: its host's number, from 0 in order of the hosts' lowest ranks."""
    @property
    def forked(self) -> bool: ...
    @property
    def formed(self) -> bool:
        """Whether the ranks of a device group are connected; True for other groups."""
    def form(self, limit_s: float, /) -> None:
        """Collective for a device group: connects its ranks within the limit, if they are not."""
    def stats(self) -> Stats: ...
    def close(self) -> None: ...
    def close_after_peers(self, wait_s: float, /) -> None:
        """close(), which returns when all peers have left or died, or after `wait_s`; of a device
        group when its calls are complete, or aborts them after `wait_s`."""
    def abort(self, reason: str, /) -> None: ...
    def _capsule(self) -> object: ...

class Group(Collectives):
    def allocate(self, nbytes: int, /) -> SharedMemory | None:
        """Memory for zero-copy calls of this group; None if its ranks do not share memory."""
    def split(self, color: int, key: int, /) -> Group | None: ...
    def lost(self) -> list[int]:
        """The ranks that this rank knew to be lost when the group broke."""
    def status(self) -> dict[str, Any]: ...
    def set_timeout(self, timeout_s: float, /) -> None: ...

def group_of(capsule: object, /) -> Group:
    """The group in a capsule of Group._capsule()."""

def on_device(
    group: object,
    device: object,
    nccl: object | None,
    why_no_nccl: str,
    nccl_sharing: tuple[bool, str],
    options: tuple[int, bool, bool],
    timeout_s: float,
    /,
) -> Collectives:
    """The device group of the same ranks, not connected yet.

    `group`, `device` and `nccl` are capsules; the last two come from the module that has CUDA;
    `why_no_nccl`: if there is none; `nccl_sharing`: as of config.nccl_sharing();
    `options`: the number of channels for large arrays, whether NCCL is used between hosts, and
    whether repeated calls are enqueued before the agreement; rank 0's apply; `timeout_s`: of calls
    without their own."""

def describe_device(device: object, /) -> str:
    """Name, PCI bus id, compute capability, versions of driver and runtime.

    `device`: as of on_device()."""

def check_address(address: str, /) -> None: ...
def regroup(
    group: Group,
    store: Store,
    name: str,
    rank: int,
    ranks: Sequence[int],
    timeout_s: float,
    /,
) -> Group:
    """Collective over some ranks of `group`, and over processes that join them by connect(): their
    group, formed through `store`. `rank`: this process's; `ranks`: the group's. `group` may be
    broken."""

def connect(
    store: Store,
    *,
    rank: int,
    size: int,
    name: str,
    timeout_s: float,
    secret: str,
    transport: str,
    address: str,
    route_hint: str,
    reproducible: bool,
    log: bool,
    heartbeat_s: float = 10.0,
    faults: list[tuple[str, str, int, int, float, int, str]] = ...,
    tuned: list[tuple[str, int, int]] = ...,
    flight: str = "",
    trace: str = "",
    link_bytes_per_s: float = 0.0,
    host: str = "",
    encrypt: bool = False,
    thread_multiple: bool = False,
    ranks: Sequence[int] = ...,
    parent: Group | None = None,
) -> Group:
    """`parent`: a group that all ranks have, from whose key the new one's is derived, in place of
    `secret`."""
