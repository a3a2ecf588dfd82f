"""The torch.distributed backend "pycomm": how torch's groups come to stand on our engine.

`torch.distributed.init_process_group("pycomm")` needs no import of this file: it is for `stats`
and for the `Options` to give to `init_process_group(pg_options=...)`. The verbs are C++ (the module
_c10d); docs/torch_backend.md lists them.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from pycomm import _core, _torch_autoload, config, device_groups, rendezvous, thresholds
from pycomm import group as groups
from pycomm.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, _DistributedBackendOptions
    from torch.distributed.distributed_c10d import GroupName

    from pycomm import _c10d

__all__ = ["Options", "create", "is_available", "merge", "stats"]

REBUILD = "rebuild it in its folder: `pip install --no-build-isolation --no-deps .`"

_torch_autoload.register()


@functools.cache
def _module() -> Any:
    """The compiled part. Raises Unsupported where it is missing or was built for another torch."""
    try:
        from pycomm import _c10d
    except ImportError as error:
        raise Unsupported(
            f"pycomm's torch backend cannot be loaded with torch {torch.__version__} ({error}); "
            f"it is built for one version of torch: {REBUILD}"
        ) from error
    _check_version(_c10d.torch_version, torch.__version__)
    atexit.register(_c10d.close_all)
    return _c10d


def _check_version(built_for: str, running: str) -> None:
    if built_for != running.partition("+")[0]:
        raise Unsupported(
            f"pycomm's torch backend was built for torch {built_for} and this is torch {running}; "
            f"{REBUILD}"
        )


def is_available() -> bool:
    """Whether the compiled part is there and fits this torch."""
    try:
        _module()
    except Unsupported:  # its text is for those who ask for more
        return False
    return True


def Options(  # noqa: N802 - as torch's
    timeout: timedelta | None = None,
    cuda_channels: int = 1,
    cuda_internode_transport: str = "nccl",
    encrypt: bool | None = None,
) -> _c10d.Options:
    """Options of a group, as torch's other backends have them.

    Args:
        timeout: limits each call; None: torch's own limit.
        cuda_channels, cuda_internode_transport: as of `pycomm.Group`, for tensors on CUDA devices.
        encrypt: as of `pycomm.init`; None: as the default group, if there is one.

    Raises:
        InvalidArgument: there is no such transport between hosts, or no such number of channels.
    """
    device_groups.check_internode_transport(cuda_internode_transport)
    device_groups.check_channels(cuda_channels)
    given = {} if timeout is None else {"timeout": timeout}
    made: _c10d.Options = _module().Options(
        **given,
        cuda_channels=cuda_channels,
        cuda_internode_transport=cuda_internode_transport,
        encrypt=encrypt,
    )
    return made


def create(options: _DistributedBackendOptions, backend_options: object) -> _c10d.Backend:
    """Connects the ranks of a new torch group and gives its backend. Collective over that group.

    The engine of `pycomm.init` serves torch's default group too, if it has the same ranks, and
    stays open when torch's group ends; else torch's engine becomes pycomm's default group while it
    stands.

    Raises:
        Unsupported: the compiled part does not fit this torch.
        InvalidArgument: `backend_options` are those of another backend, or want an encryption that
            the engine of `pycomm.init` does not have.
        Timeout, PeerLost, Mismatch: the group did not form; the text names the ranks.
    """
    timeout = timedelta(seconds=_seconds(options.timeout))
    ours = _options(backend_options, timeout)
    ours.global_ranks_in_group = options.global_ranks_in_group
    ours.group_name = cast("GroupName", options.group_id)
    if options.global_ranks_in_group:
        return _form(options, ours, groups.register_backend)
    shared = _engine_of_init(options)
    if shared is None:
        return _form(options, ours, groups.register_core)
    _encrypt(ours, shared)
    backend: _c10d.Backend = _module().Backend(shared._capsule(), ours, False, None)
    return backend


def merge(store: Store, ours: _c10d.Options, rank: int, size: int) -> _c10d.Backend:
    """Connects ranks of several torch groups, or of several runs, that meet in `store`, and gives
    the backend of their group, which ends where the default group does. Collective over them.

    Called by the compiled backend for `ProcessGroup.merge_remote_group`, which numbers the ranks as
    they come to the store.

    Args:
        ours: of the new group, whose name and limit they have.

    Raises:
        InvalidArgument: more ranks have come to the store than the group has.
        Timeout, PeerLost, Mismatch: the group did not form; the text names the ranks.
    """
    if rank >= size:
        raise InvalidArgument(
            f"merge_remote_group: this is rank {rank} of those that have met in the store, and the "
            f"group has {size}: give each merge a store, or a PrefixStore, of its own"
        )
    from torch._C import _distributed_c10d as c10d

    options = c10d._DistributedBackendOptions()
    options.store, options.group_id = store, str(ours.group_name)
    options.group_rank, options.group_size, options.timeout = rank, size, ours._timeout
    ours.global_ranks_in_group = []
    return _form(options, ours, groups.register_backend)


def _form(
    options: _DistributedBackendOptions,
    ours: _c10d.Options,
    enter: Callable[[_core.Group, rendezvous.TorchStore, float], Callable[[], None]],
) -> _c10d.Backend:
    """Connects the ranks of a new group, which `enter` gives its place beside the default group."""
    module, timeout = _module(), ours._timeout
    encrypt = _encrypt(ours, None)
    store = rendezvous.TorchStore(options.store, config.environment().secret)
    core = _connect(store, options, timeout, encrypt)
    ended = enter(core, store, timeout.total_seconds())
    backend: _c10d.Backend = module.Backend(core._capsule(), ours, True, ended)
    return backend


def register_backend(part: object, timeout_s: float) -> Callable[[], None]:
    """Lets a part that torch's split_group() made end where the default group does; gives what
    forgets it. `part` is a capsule of a group. Called by the compiled backend."""
    return groups.register_backend(_core.group_of(part), None, timeout_s)


def _options(given: object, timeout: timedelta) -> _c10d.Options:
    if given is not None and not isinstance(given, _module().Options):
        raise InvalidArgument(
            f"pg_options is a {type(given).__name__}; the backend pycomm takes "
            "pycomm.torch_backend.Options"
        )
    ours: _c10d.Options = _module().Options() if given is None else given
    ours._timeout = timeout
    return ours


def _encrypt(ours: _c10d.Options, shared: _core.Group | None) -> bool:
    """Whether a new group is encrypted: as its options say, else as the default group is, so that
    a part of an encrypted group never is in the clear by oversight."""
    if shared is not None and ours.encrypt not in (None, shared.encrypted):
        raise InvalidArgument(
            f"Options(encrypt={ours.encrypt}), but torch's group uses the engine of pycomm.init, "
            f"which has encrypt={shared.encrypted}: give both the same"
        )
    if ours.encrypt is not None:
        return bool(ours.encrypt)
    return config.environment().encrypt or groups.default_is_encrypted()


def _seconds(timeout: timedelta | float) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def _engine_of_init(options: _DistributedBackendOptions) -> _core.Group | None:
    """The engine behind pycomm's default group, where it has the ranks of torch's."""
    core = groups.default_core()
    if core is None or (core.rank, core.size) != (options.group_rank, options.group_size):
        return None
    return core


def _connect(
    store: rendezvous.TorchStore,
    options: _DistributedBackendOptions,
    timeout: timedelta,
    encrypt: bool,
) -> _core.Group:
    """Forms the group through torch's store; rank 0 leaves the run's key there if there is none."""
    place = config.environment()
    if options.group_size > 1:  # where the program told torch, not the environment, who it is
        config.take_secret()
    groups.log_at(place.log)
    return rendezvous.connect(
        store,
        rank=options.group_rank,
        size=options.group_size,
        name=options.group_id or "default",
        timeout_s=timeout.total_seconds(),
        secret=place.secret,
        encrypt=encrypt,
        transport=place.transport,
        address=place.address,
        route_hint=rendezvous.host_of(options.store) or place.master_host,
        reproducible=False,
        log=place.log != "warning",
        tuned=thresholds.thresholds(),
        **config.flight_recorder_files(),
    )


def stats(process_group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """What this rank has done in a group since it stands.

    Args:
        process_group: a group of torch's with the backend pycomm; None is the default group.

    Returns:
        calls, frames_sent, bytes_sent (payload), bytes_written (with frame headers: what peers were
        really sent), bytes_received, and the seconds spent inside calls.

    Raises:
        InvalidArgument: the group has other backends.
    """
    process_group = process_group or dist.group.WORLD
    if process_group is None:
        raise InvalidArgument("no process group: call torch.distributed.init_process_group first")
    names = []
    for device in process_group._device_types:
        backend: Any = process_group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, _module().Backend):
            counted: dict[str, float] = backend.stats()
            return counted
        names.append(f"{device.type}: {backend.name()}")
    raise InvalidArgument(f"the group's backend is not pycomm, but {', '.join(names)}")
