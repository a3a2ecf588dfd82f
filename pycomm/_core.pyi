"""What the compiled engine offers to the package. Private: use the functions of `pycomm`."""

from typing import Any, Protocol, TypeAlias

from typing_extensions import Unpack

OPERATIONS: tuple[str, ...]
DTYPES: tuple[str, ...]
REDUCE_OPS: tuple[str, ...]
ALGORITHMS: tuple[str, ...]
compiler: str

def address(array: Any, /) -> int: ...

class PythonStore(Protocol):
    """What connect() takes for a store beside those below."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, timeout_s: float, /) -> bytes: ...

class Store:
    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, timeout_s: float, /) -> bytes: ...

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
    """What a rank has done so far; `bytes` is bytes_written, which counts frame headers too."""

    calls: int
    frames_sent: int
    bytes_sent: int
    bytes_written: int
    bytes_received: int
    bytes: int
    seconds: float

class Member:
    """Who a rank is; `transport` is what this rank reaches it by."""

    host: str
    pid: int
    transport: str

# operation, dtype, op, input, output, count, peer, tag, algorithm, timeout_s: those of the core's
# Call, with names for enums, addresses for pointers, and 0 for the group's time limit.
Call: TypeAlias = tuple[str, str, str, int, int, int, int, int, str, float]

class Work:
    def done(self) -> bool: ...
    def wait(self, timeout_s: float, /) -> None: ...

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
    def forked(self) -> bool: ...
    def run(self, *call: Unpack[Call]) -> None: ...
    def start(self, arrays: object, /, *call: Unpack[Call]) -> Work: ...
    def split(self, color: int, key: int, /) -> Group | None: ...
    def stats(self) -> Stats: ...
    def set_timeout(self, timeout_s: float, /) -> None: ...
    def close(self) -> None: ...
    def abort(self, reason: str, /) -> None: ...
    def _capsule(self) -> object: ...

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
    reproducible: bool,
    log: bool,
) -> Group: ...
