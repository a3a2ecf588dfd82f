"""pycomm's groups in place of those of torch's gloo, for pycomm.torch_backend.replace().

torch, RPC and programs make a gloo backend by calling `ProcessGroupGloo`. While it is replaced,
that name is an object that makes pycomm's backend instead. It is no class, so that a program can
still derive a class from torch's own.

Such a backend has the type CUSTOM in its group. For a group of the type GLOO, torch's logger of DDP
casts the backend to its own class without a check.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from pycomm import _c10d
from pycomm._c10d.coalescing import unwrapped
from pycomm.errors import Mismatch, Unsupported

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, _DistributedBackendOptions

    from pycomm import _core
    from pycomm._c10d import compiled

GLOO = "gloo"
VARIABLE, CALL = "PYCOMM_REPLACE=gloo", 'replace("gloo")'  # what asked for it
HELPERS_GROUP = "it is the helper of TORCH_DISTRIBUTED_DEBUG=DETAIL"
WITH_DEVICES = "its options name gloo's devices"
MOST_LOOKS = 32  # for gloo's keys, in each pause of a rank that waits
_log = logging.getLogger("pycomm")

# Makes the backend of a group; whether it is torch's default group.
Make = Callable[["_DistributedBackendOptions", bool], "compiled.Backend"]


@dataclass
class _State:
    """What this process did."""

    made: int = 0  # groups in place of gloo's
    reasons: set[str] = field(default_factory=set)  # that were logged
    undo: list[Callable[[], None]] = field(default_factory=list)


class _Caller(threading.local):
    """What torch does in this thread when it asks for a gloo backend."""

    arguments: dict[str, Any] | None = None  # of the function that makes a group
    makes_helper: bool = False


_state, _caller = _State(), _Caller()


class _ProcessGroupGloo:
    """The object in place of the class. Other attributes are torch's."""

    def __init__(self, torchs: Any, make: Make) -> None:
        self._torchs, self._make = torchs, make
        self._pattern, self._origin = "", CALL

    def _configure(self, pattern: str, origin: str) -> None:
        self._pattern, self._origin = pattern, origin

    def __call__(self, *args: Any, **given: Any) -> Any:
        """As the constructors of the class: (store, rank, size, timeout or options)."""
        group = _caller.arguments or {}
        try:
            asked = _asked(*args, **given)
        except TypeError:  # invalid, or of a newer torch: its class decides
            asked = None
        if asked is None or self._why_torchs(asked, group):
            return self._torchs(*args, **given)
        options = _described(asked, group)
        ranks, world = options.global_ranks_in_group, dist.group.WORLD
        backend = self._make(options, bool(group) and not ranks and world is None)
        _state.made += 1
        return backend

    def _why_torchs(self, asked: dict[str, Any], group: dict[str, Any]) -> str:
        """Why the group stays torch's, from facts that are the same on all ranks; "" if not."""
        names = [str(group.get(name) or "") for name in ("group_desc", "group_name")]
        reason = ""
        if _caller.makes_helper:
            reason = HELPERS_GROUP
        elif asked["options"] is not None and asked["options"]._devices:
            reason = WITH_DEVICES
        elif any(fnmatch.fnmatchcase(name, self._pattern) for name in names if name):
            reason = f"{' or '.join(map(repr, names))} matches except={self._pattern}"
        if reason and reason not in _state.reasons:
            _state.reasons.add(reason)
            _log.info("a group stays with torch's gloo: %s", reason)
        return reason

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._torchs) or stands_in(instance)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._torchs)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._torchs,)

    def __or__(self, other: Any) -> Any:
        return self._torchs | other

    def __ror__(self, other: Any) -> Any:
        return other | self._torchs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torchs, name)

    def __reduce__(self) -> Any:  # a process that loads it may have torch's class
        return _current, ()


def _current() -> Any:
    return getattr(distributed_c10d, "ProcessGroupGloo", None)  # a torch without gloo lacks it


def _asked(
    store: Store,
    rank: int,
    size: int,
    timeout: Any = distributed_c10d.default_pg_timeout,
    enable_reconfigure: bool = False,
    *,
    options: Any = None,
) -> dict[str, Any]:
    if not isinstance(timeout, timedelta):
        options = timeout
    kind = c10d.ProcessGroupGloo._Options  # type: ignore[attr-defined]  # not in torch's stubs
    if isinstance(options, kind):
        timeout = options._timeout
    elif options is not None or timeout is None:
        raise TypeError(f"invalid options: got {options!r}, expected ProcessGroupGloo._Options")
    return {
        "store": store,
        "rank": rank,
        "size": size,
        "timeout": timeout,
        "enable_reconfigure": enable_reconfigure,
        "options": options,
    }


def _described(asked: dict[str, Any], group: dict[str, Any]) -> _DistributedBackendOptions:
    """The description that torch gives a backend which is registered by name."""
    made: Any = c10d._DistributedBackendOptions()
    made.store, made.timeout = asked["store"], asked["timeout"]
    made.group_rank, made.group_size = asked["rank"], asked["size"]
    made.group_id = str(group.get("group_name") or GLOO)
    made.global_ranks_in_group = list(group.get("global_ranks_in_group") or [])
    if asked["enable_reconfigure"]:  # only torch 2.14 and later have it
        made.enable_reconfigure = True
    described: _DistributedBackendOptions = made
    return described


def stands_in(backend: Any) -> bool:
    """Whether the backend is pycomm's in place of gloo's."""
    if not _state.made:
        return False
    return isinstance(backend, _backend()) and backend.options.replaces == GLOO


@functools.cache  # load() reads the metadata of torch each time
def _backend() -> Any:
    return _c10d.load().Backend


def made() -> int:
    """How many groups this process made in place of gloo's."""
    return _state.made


def replaced() -> bool:
    """Whether new groups of gloo are pycomm's."""
    return isinstance(_current(), _ProcessGroupGloo)


def replace(make: Make, pattern: str, origin: str) -> None:
    """From now on `make` makes the groups that torch would make with gloo, except for those whose
    description or name matches `pattern`.

    Raises:
        Unsupported: there is no module for this torch, or torch makes its groups in another way.
    """
    if not replaced():
        _check_torch()
        _install(_ProcessGroupGloo(_current(), make))
    _current()._configure(pattern, origin)


def restore() -> None:
    """Gives new groups back to torch's gloo."""
    while _state.undo:
        _state.undo.pop()()


def _check_torch() -> None:
    why = _c10d.why_not(torch.__version__)
    if not why and not dist.is_gloo_available():
        why = f"torch {torch.__version__} has no gloo"
    if not why and not _is_known():
        why = f"torch {torch.__version__} makes groups of gloo in a way that is unknown"
    if why:
        raise Unsupported(f"pycomm cannot stand in for gloo: {why}")


def _is_known() -> bool:
    """Whether torch's functions take the arguments, and use the name, that are replaced here."""
    helper = inspect.unwrap(distributed_c10d._new_process_group_helper)
    # From torch 2.14 on gloo is registered by name, with a function of its own.
    maker = getattr(distributed_c10d, "_create_gloo_process_group", helper)
    wrapper = inspect.unwrap(distributed_c10d._create_process_group_wrapper)
    needed = {"global_ranks_in_group", "backend", "group_name", "group_desc"}
    return needed <= set(inspect.signature(helper).parameters) and all(
        "ProcessGroupGloo" in function.__code__.co_names for function in (maker, wrapper)
    )


def _install(gloo: _ProcessGroupGloo) -> None:
    helper = distributed_c10d._new_process_group_helper
    wrapper = distributed_c10d._create_process_group_wrapper
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def new_process_group(*args: Any, **given: Any) -> Any:
        with _calling(arguments=dict(signature.bind(*args, **given).arguments)):
            return helper(*args, **given)

    @functools.wraps(wrapper)
    def process_group_wrapper(*args: Any, **given: Any) -> Any:
        with _calling(makes_helper=True):
            return wrapper(*args, **given)

    for module in (distributed_c10d, dist):
        _set(module, "ProcessGroupGloo", gloo)
    _set(distributed_c10d, "_new_process_group_helper", new_process_group)
    _set(distributed_c10d, "_create_process_group_wrapper", process_group_wrapper)
    _register_as_custom()


def _set(owner: Any, name: str, value: Any) -> None:
    _state.undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, value)


@contextlib.contextmanager
def _calling(**now: Any) -> Iterator[None]:
    before = {name: getattr(_caller, name) for name in now}
    vars(_caller).update(now)
    try:
        yield
    finally:
        vars(_caller).update(before)


@functools.cache
def _register_as_custom() -> None:
    """Registers pycomm's backends in any group as CUSTOM, also where a program says GLOO. It stays
    after restore(), for the groups that exist.
    """
    group = dist.ProcessGroup
    custom, gloo = group.BackendType.CUSTOM, group.BackendType.GLOO
    register, set_default = group._register_backend, group._set_default_backend

    @functools.wraps(register)
    def register_backend(
        self: Any, device: torch.device, backend_type: Any, backend: Any = None
    ) -> None:
        if not stands_in(unwrapped(backend)):
            return register(self, device, backend_type, backend)
        # A group has one backend of the type CUSTOM.
        if backend_type == gloo and not _has_another_custom(_caller.arguments):
            backend_type = custom
        register(self, device, backend_type, backend)
        if self._get_backend_name() == GLOO:
            set_default(self, custom)
        return None

    @functools.wraps(set_default)
    def set_default_backend(self: Any, backend_type: Any) -> None:
        if backend_type == gloo and any(
            stands_in(unwrapped(self._get_backend(device))) for device in self._device_types
        ):
            backend_type = custom
        set_default(self, backend_type)

    group._register_backend = register_backend  # type: ignore[method-assign]  # torch's method
    group._set_default_backend = set_default_backend  # type: ignore[method-assign]  # torch's too


def _has_another_custom(arguments: dict[str, Any] | None) -> bool:
    """Whether torch makes a group that has a backend of another library too."""
    if not arguments:
        return False
    chosen = distributed_c10d.BackendConfig(arguments["backend"]).get_device_backend_map()
    types = dist.Backend.backend_type_map
    custom = dist.ProcessGroup.BackendType.CUSTOM
    return any(types.get(str(one), custom) == custom for one in chosen.values() if one != GLOO)


def log_formed(core: _core.Group) -> None:
    """Logs a line for the first group: visible on rank 0 if only a variable asked for it."""
    if _state.made:
        return
    origin = getattr(_current(), "_origin", CALL)
    by_variable = origin == VARIABLE
    transports = sorted({member.transport for member in core.members} - {"self"})
    _log.log(
        logging.WARNING if by_variable and core.rank == 0 else logging.INFO,
        'pycomm replaces gloo (%s): group "%s", %d rank%s, %d host%s%s; %s to go back',
        *(origin, core.name, core.size, "s" * (core.size > 1)),
        *(core.host_count, "s" * (core.host_count > 1)),
        "".join(f", {name}" for name in transports),
        "unset the variable" if by_variable else 'restore("gloo")',
    )


class Watch:
    """Looks for ranks that make the group with torch's gloo, while this rank waits for them in the
    group's store. gloo stores each rank's address under "0/<rank>".
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._ranks = rank, [one for one in range(size) if one != rank]
        self._stale: bool | None = None  # keys of an earlier group are in the store

    def __call__(self, store: Any) -> None:
        """Raises Mismatch if there is such a rank."""
        if self._stale is None:
            self._stale = store.check([_key(self._rank)])
        if self._stale:
            return
        looks, self._ranks = self._ranks[:MOST_LOOKS], self._ranks[MOST_LOOKS:]
        self._ranks += looks
        theirs = [rank for rank in looks if store.check([_key(rank)])]
        if theirs:
            raise Mismatch(
                f"{_numbered(theirs)} this group with torch's gloo, and rank {self._rank} with "
                f"pycomm: set {VARIABLE} on every rank",
                op="init",
                rank=self._rank,
                peer=theirs[0],
            )


def _key(rank: int) -> str:
    return f"0/{rank}"


def _numbered(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} makes"
    return f"ranks {', '.join(map(str, ranks))} make"
