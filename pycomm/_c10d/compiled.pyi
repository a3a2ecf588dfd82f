"""The modules torch_<major>_<minor>: the backend for torch.distributed, compiled."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend as _C10dBackend
from torch._C._distributed_c10d import ErrorType, Store

class Options(_C10dBackend.Options):
    def __init__(
        self,
        timeout: timedelta = ...,
        cuda_channels: int = 1,
        cuda_internode_transport: str = "nccl",
        encrypt: bool | None = None,
        cuda_agreement: str = "before",
        thread_multiple: bool | None = None,
        replaces: str = "",
    ) -> None: ...
    @property
    def replaces(self) -> str:
        """The backend of torch in whose place the program got the group; "": none."""
    @property
    def cuda_channels(self) -> int: ...
    @property
    def cuda_internode_transport(self) -> str: ...
    @property
    def cuda_agreement(self) -> str: ...
    @property
    def encrypt(self) -> bool | None: ...
    @property
    def thread_multiple(self) -> bool | None: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Options: ...

class Backend(_C10dBackend):
    """A backend for the group in a capsule of _core.Group._capsule(), whose ranks met in `store`.

    `owner`: the backend closes the group and then calls `ended`.
    """

    def __init__(
        self,
        capsule: object,
        store: Store,
        options: Options,
        owner: bool,
        ended: Callable[[], object] | None = None,
    ) -> None: ...
    @property
    def options(self) -> Options: ...
    def _capsule(self) -> object: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    def perform_nocolor_split(self, device: object) -> None: ...
    def get_error(self) -> ErrorType: ...
    def abandon_coalescing(self) -> None: ...
    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None: ...
    def unregister_abort_hook(self, hook_id: int) -> None: ...
    def stats(self) -> dict[str, float]: ...

class ReconfigurableBackend(Backend):
    """A backend for a group that reconfigure() makes. From torch 2.14 on.

    `capsule`: an aborted group of one rank, used until then; `rank`, `size`: those that torch was
    given; `handle`, `prepare`: of a Membership.
    """

    def __init__(
        self,
        capsule: object,
        store: Store,
        options: Options,
        ended: Callable[[], object],
        rank: int,
        size: int,
        handle: str,
        prepare: Callable[[int, list[str], bool], Callable[[float], object]],
    ) -> None: ...

def close_all() -> None:
    """Closes every open group; runs when the interpreter ends."""
