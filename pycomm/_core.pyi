"""What the compiled engine offers to the package. Private: use the functions of `pycomm`."""

from collections.abc import Sequence
from typing import Any, Protocol

OPERATIONS: tuple[str, ...]
DTYPES: tuple[str, ...]
REDUCE_OPS: tuple[str, ...]
ALGORITHMS: tuple[str, ...]
compiler: str

def address(array: Any, /) -> int: ...

class SharedMemory:
    """Bytes that the ranks of this host may map, as a writable buffer."""

    def __init__(self, nbytes: int, /) -> None: ...

# The short way: False, and nothing done, where `array` is not plain (contiguous, writable, on the
# host, of a dtype that travels).
def all_reduce(
    group: Group, array: Any, op: str, algorithm: str | None, timeout_s: float, /
) -> bool: ...
def broadcast(
    group: Group, array: Any, src: int, algorithm: str | None, timeout_s: float, /
) -> bool: ...
def rows(lists: tuple[list[Any], ...], /) -> tuple[Any, Any, tuple[str, ...], int, bool] | None:
    """The arrays of lists of one length, if they are plain, in host memory or on one GPU: uint64
    [rows, lists + 1], addresses and the elements of each row's arrays; uint64 [lists, rows, 2],
    addresses and bytes; the dtype of each list; the GPU's number, or -1; and whether all arrays
    have one dimension. None where arrays of a row differ in their elements or, unless flat, in
    shape, or those of a list in dtype, or have more than 2^31 - 1 elements."""

def share_memory(written: Sequence[tuple[int, int]], read: Sequence[tuple[int, int]], /) -> bool:
    """Whether in tables of (address, bytes) any memory that is written is another's too."""

# The processor's kernels, by the arguments that csrc/bindings/kernels.h names.
kernels: Any

def read_packet_header(address: int, nbytes: int, /) -> tuple[int, int, str, str]: ...
def most_compact_bytes(k: int, count: int, index_code: str, value_code: str, /) -> int: ...
def read_compact_header(address: int, nbytes: int, size: int, /) -> tuple[int, int]: ...
def most_batch_bytes(
    lengths: Sequence[int], count: int, index_code: str, value_code: str, /
) -> int: ...
def encode_batch(
    indices: int,
    values: int,
    lengths: Sequence[int],
    count: int,
    dtype: str,
    index_code: str,
    value_code: str,
    out: int,
    /,
) -> list[int]: ...
def batch_lengths(packets: int, sizes: Sequence[int], count: int, /) -> list[int]: ...
def decode_batch(
    packets: int, sizes: Sequence[int], lengths: Sequence[int], indices: int, values: int, /
) -> None: ...
def set_kernel_threads(threads: int, /) -> None: ...
def kernel_threads() -> int: ...
def set_kernel_isa(name: str, /) -> None: ...
def kernel_isa() -> str: ...
def stream_step(grad: int, u: int, v: int, count: int, /) -> None: ...
def stream_copy(source: int, target: int, count: int, around: bool, /) -> None: ...
def stream_read(x: int, count: int, /) -> int: ...

class PythonStore(Protocol):
    """What connect() takes for a store beside those below."""

    def set(self, key: str, value: bytes, timeout_s: float = ..., /) -> None: ...
    def get(self, key: str, timeout_s: float, /) -> bytes: ...
    def add(self, key: str, amount: int, timeout_s: float = ..., /) -> int: ...
    def remove(self, key: str, timeout_s: float = ..., /) -> bytes | None: ...
    def claim(self, key: str, value: bytes, timeout_s: float = ..., /) -> bytes: ...
    def settle(self) -> None: ...

class Store:
    """A place for keys; csrc/rendezvous/store.h says what each method promises."""

    def set(self, key: str, value: bytes, timeout_s: float = ..., /) -> None: ...
    def get(self, key: str, timeout_s: float, /) -> bytes: ...
    def add(self, key: str, amount: int, timeout_s: float = ..., /) -> int: ...
    def remove(self, key: str, timeout_s: float = ..., /) -> bytes | None: ...
    def claim(self, key: str, value: bytes, timeout_s: float = ..., /) -> bytes: ...
    def settle(self) -> None: ...

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
    """What a rank has done so far; `bytes` is bytes_written, which counts frame headers too.

    `algorithm`: of a group on devices, by what calls go that name none: "nccl" or "host_staged";
    else "auto"."""

    calls: int
    frames_sent: int
    bytes_sent: int
    bytes_written: int
    bytes_received: int
    bytes: int
    seconds: float
    algorithm: str

class Member:
    """Who a rank is; `transport` is what this rank reaches it by, and `visible` says whether `pid`
    names its process here. `started`: when that process began, field 22 of /proc/PID/stat; 0:
    unknown."""

    host: str
    pid: int
    transport: str
    visible: bool
    started: int

class Work:
    def done(self) -> bool: ...
    def wait(self, timeout_s: float, /) -> None: ...
    def precede(self, stream: int, /) -> None:
        """On a device, after wait(): what is put on `stream` from now on comes after the call."""
    @property
    def source(self) -> int | None:
        """The sender of what a recv has received; None of another call, or before it is over."""

class Group:
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
    def hosts(self) -> list[int]:
        """By rank: which host, numbered from 0 in order of their first ranks."""
    @property
    def forked(self) -> bool: ...
    def allocate(self, nbytes: int, /) -> SharedMemory | None:
        """Memory in which calls of this group stage nothing; None where its ranks share none."""
    # The core's Call, with names for enums, addresses for pointers, 0 for the group's time limit;
    # `stream` is the caller's, of a group on a device;
    # a recv with peer -1 takes from anybody. Counts, in elements: all_gather: what each rank gives;
    # all_to_all: what goes to each rank, and behind that what comes from each; `count` is then 0.
    # `counts_fit`: the ranks have exchanged these counts, so that the call does not compare them.
    def run(
        self,
        operation: str,
        dtype: str,
        op: str,
        input: int,
        output: int,
        count: int,
        peer: int,
        tag: int,
        algorithm: str,
        timeout_s: float,
        counts: Sequence[int] | None = None,
        stream: int = 0,
        counts_fit: bool = False,
        /,
    ) -> int | None:
        """Gives the sender of what a recv has received, and None for every other call."""
    def start(
        self,
        arrays: object,
        operation: str,
        dtype: str,
        op: str,
        input: int,
        output: int,
        count: int,
        peer: int,
        tag: int,
        algorithm: str,
        timeout_s: float,
        counts: Sequence[int] | None = None,
        stream: int = 0,
        counts_fit: bool = False,
        /,
    ) -> Work:
        """The same, on the group's own thread; `arrays` are kept alive until the call is over."""
    def split(self, color: int, key: int, /) -> Group | None: ...
    def lost(self) -> list[int]:
        """Ranks that will not come back, as far as this rank knew when the group broke."""
    def stats(self) -> Stats: ...
    def status(self) -> dict[str, Any]: ...
    def set_timeout(self, timeout_s: float, /) -> None: ...
    def close(self) -> None: ...
    def abort(self, reason: str, /) -> None: ...
    def _capsule(self) -> object: ...

def group_of(capsule: object, /) -> Group:
    """The group that Group._capsule() gave."""

def on_device(
    group: object,
    device: object,
    nccl: object | None,
    why_no_nccl: str,
    nccl_shares: bool,
    lines: tuple[int, bool],
    timeout_s: float,
    limit_s: float,
    /,
) -> Group:
    """Collective. The group of the same ranks for arrays on devices.

    `group` is a capsule of a group, `device` and `nccl` are those of the module that has CUDA;
    `why_no_nccl`: where there is none; `nccl_shares`: NCCL was told to let ranks share a device;
    `lines`: the number of rings over large arrays, and whether NCCL is used between hosts, as rank
    0 gives them; `timeout_s`: of later calls; `limit_s`: until all ranks have come."""

def check_address(address: str, /) -> None: ...
def regroup(
    group: Group,
    store: Store | PythonStore,
    name: str,
    members: Sequence[int],
    timeout_s: float,
    /,
) -> Group:
    """Collective over `members` of `group`, in this order: the group of them, which meets in
    `store`. `group` may be broken."""

def connect(
    store: Store | PythonStore,
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
) -> Group: ...
