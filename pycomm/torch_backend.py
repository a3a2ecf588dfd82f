"""The torch.distributed backend "pycomm": creates pycomm groups for torch's process groups.

`torch.distributed.init_process_group("pycomm")` needs no import of this module: the entry point
pycomm_torch_autoload imports it at the end of every `import torch`. So it imports nothing slow, and
loads the compiled module _c10d for the first group. It provides `stats`, the `Options` for
`init_process_group(pg_options=...)`, and `replace`, which puts pycomm in place of gloo; the import
does so if PYCOMM_REPLACE says so. docs/torch_backend.md lists the collectives.
"""

from __future__ import annotations

import atexit
import functools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.autograd import profiler

from pycomm import _c10d, _core, config, default_group
from pycomm._arguments import flag, instance, integer, integers, one_of, plain_text, refuse
from pycomm._bootstrap import reconfigure, rendezvous
from pycomm._c10d import coalescing, gloo
from pycomm._core_api import device_groups
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import NO_SYMMETRIC_MEMORY

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, _DistributedBackendOptions
    from torch.distributed.distributed_c10d import GroupName

    from pycomm._c10d import compiled

__all__ = ["Options", "create", "is_available", "merge", "replace", "restore", "shrink", "stats"]

_core.set_profiler(profiler)


@functools.cache
def _module() -> Any:
    """The compiled module. Raises Unsupported if none fits this torch."""
    module = _c10d.load()
    atexit.register(module.close_all)
    coalescing.replace_manager(module.Backend)
    return module


def is_available() -> bool:
    """Whether the compiled module exists and was built for this torch."""
    try:
        _module()
    except Unsupported:  # other functions raise it with its text
        return False
    return True


def Options(  # noqa: N802 - as torch's
    timeout: timedelta | None = None,
    cuda_channels: int = 1,
    cuda_internode_transport: str = "nccl",
    encrypt: bool | None = None,
    cuda_symmetric_memory: bool = False,
    cuda_agreement: str = "before",
    thread_multiple: bool | None = None,
) -> compiled.Options:
    """Options of a group, for `init_process_group(pg_options=...)` and `new_group`.

    Args:
        timeout: time limit of each call; None: torch's default.
        cuda_channels, cuda_internode_transport, cuda_agreement: as of `pycomm.Group`, for tensors
            on CUDA devices.
        encrypt, thread_multiple: as of `pycomm.init`; None: as the default group, if there is one.
        cuda_symmetric_memory: was removed; True raises Unsupported.

    Raises:
        InvalidArgument: an argument of another type, or an invalid transport, agreement or number
            of channels.
        Unsupported: the compiled module does not fit this torch.
    """
    device_groups.Options(cuda_channels, cuda_internode_transport, cuda_agreement).check()
    encrypt = None if encrypt is None else flag("encrypt", encrypt)
    if thread_multiple is not None:
        thread_multiple = flag("thread_multiple", thread_multiple)
    if flag("cuda_symmetric_memory", cuda_symmetric_memory):
        raise Unsupported(f"cuda_symmetric_memory: {NO_SYMMETRIC_MEMORY}")
    if timeout is not None:
        instance("timeout", timeout, timedelta, "a datetime.timedelta, or None")
    given = {} if timeout is None else {"timeout": timeout}
    made: compiled.Options = _module().Options(
        **given,
        cuda_channels=cuda_channels,
        cuda_internode_transport=cuda_internode_transport,
        encrypt=encrypt,
        cuda_agreement=cuda_agreement,
        thread_multiple=thread_multiple,
    )
    return made


def create(options: _DistributedBackendOptions, backend_options: object) -> compiled.Backend:
    """Connects the ranks of a new torch group and returns its backend. Collective over that group.

    torch's default group shares the engine of `pycomm.init` if it has the same ranks; the engine
    then stays open when torch's group ends. Otherwise torch's engine is pycomm's default group
    until torch's group ends. With enable_reconfigure=True (torch 2.14) no ranks are connected:
    reconfigure() does that.

    Raises:
        Unsupported: the compiled module does not fit this torch.
        InvalidArgument: `options` are of another type, or `backend_options` belong to another
            backend, or differ from the engine of `pycomm.init` in `encrypt` or `thread_multiple`.
        Timeout, PeerLost, Mismatch: the group did not form; the text names the ranks.
    """
    instance("options", options, c10d._DistributedBackendOptions, "options that torch makes")
    timeout = timedelta(seconds=_seconds(options.timeout))
    ours = _options(backend_options, timeout)
    ours.global_ranks_in_group = options.global_ranks_in_group
    ours.group_name = cast("GroupName", options.group_id)
    if any(getattr(one, "enable_reconfigure", False) for one in (options, ours)):
        return _reconfigurable(options, ours)
    if dist.group.WORLD is not None:  # also without global ranks, of ranks of several runs
        return _form(options, ours, default_group.register_backend)
    shared = _engine_of_init(options)
    if shared is None:
        return _form(options, ours, default_group.register_core)
    _inherited(ours, config.environment().encrypt, shared)
    backend: compiled.Backend = _module().Backend(
        shared._capsule(), options.store, ours, False, None
    )
    return backend


def merge(store: Store, ours: compiled.Options, rank: int, size: int) -> compiled.Backend:
    """Connects ranks of several torch groups or runs that meet in `store`; returns the backend of
    their group. Collective over them. abort() of the default group aborts it too.

    `ProcessGroup.merge_remote_group` numbers the ranks in the order in which they reach the store.

    Args:
        ours: options of the new group, with its name and time limit.

    Raises:
        InvalidArgument: an argument is of another type, or more ranks reached the store than the
            group has.
        Timeout, PeerLost, Mismatch: the group did not form; the text names the ranks.
    """
    _check_store(store)
    instance("ours", ours, _module().Options, "pycomm.torch_backend.Options")
    size = integer("size", size, 1, 2**31 - 1)
    rank = integer("rank", rank, 0, 2**31 - 1)
    if rank >= size:
        raise InvalidArgument(
            f"merge_remote_group: this is rank {rank} in the store, and the group has {size}: "
            "use a separate store or PrefixStore for each merge"
        )
    options = _described(store, str(ours.group_name), rank, size, ours._timeout)
    ours.global_ranks_in_group = []
    return _form(options, ours, default_group.register_backend)


def _check_store(store: object) -> None:
    instance("store", store, c10d.Store, "a store of torch")


def _described(
    store: Store, name: str, rank: int, size: int, timeout: timedelta
) -> _DistributedBackendOptions:
    """The argument of create() for a group that torch did not ask for."""
    options = c10d._DistributedBackendOptions()
    options.store, options.group_id = store, name
    options.group_rank, options.group_size, options.timeout = rank, size, timeout
    return options


def _reconfigurable(
    options: _DistributedBackendOptions, ours: compiled.Options
) -> compiled.ReconfigurableBackend:
    """A backend without ranks, which reconfigure() connects."""
    inherited = _inherited(ours, config.environment().encrypt)

    def connect(
        store: _core.Store, name: str, rank: int, size: int, timeout_s: float
    ) -> _core.Group:
        timeout = timedelta(seconds=timeout_s)
        return _connect(
            store,
            _described(options.store, name, rank, size, timeout),
            timeout,
            inherited,
            config.environment(),
        )

    def register(core: _core.Group, store: _core.TcpStore) -> Callable[[], None]:
        timeout_s = ours._timeout.total_seconds()
        core.set_timeout(timeout_s)  # of its calls; forming used the remaining time
        return enter(core, store, timeout_s)

    is_default = not options.global_ranks_in_group and default_group.default_core() is None
    enter = default_group.register_core if is_default else default_group.register_backend
    membership = reconfigure.Membership(
        connect,
        register,
        config.environment().secret,
        rendezvous.host_of(options.store) or config.environment().master_host,
    )
    timeout_s = ours._timeout.total_seconds()
    core = connect(_core.LocalStore(), options.group_id or "default", 0, 1, timeout_s)
    membership.register(core)
    core.abort(reconfigure.WAITING)
    backend: compiled.ReconfigurableBackend = _module().ReconfigurableBackend(
        core._capsule(),
        options.store,
        ours,
        membership.unregister,
        options.group_rank,
        options.group_size,
        membership.handle,
        membership.prepare,
    )
    return backend


def shrink(
    part: object, store: Store, excluded: Sequence[int], ours: compiled.Options
) -> compiled.Backend:
    """Connects the ranks of a group that are not excluded; returns their backend. Collective over
    them. The group may be broken. `torch.distributed.shrink_group` calls it, and closes the group.

    A default group of pycomm on the same engine is replaced too.

    Args:
        part: a capsule of the group.
        store: the store in which the group's ranks met.
        excluded: ranks of the group in ascending order, the same on all ranks that stay.
        ours: options of the new group, with its time limit.

    Raises:
        InvalidArgument: an argument is of another type.
        Timeout, PeerLost, Mismatch: the group did not form; the text names the ranks.
    """
    _check_store(store)
    instance("ours", ours, _module().Options, "pycomm.torch_backend.Options")
    excluded = integers("excluded", excluded, 0)
    if type(part).__name__ != "PyCapsule":
        refuse("part", part, "a capsule of a group")
    core, timeout_s = _core.group_of(part), ours._timeout.total_seconds()
    kept = [rank for rank in range(core.size) if rank not in excluded]
    name = f"{core.name}-{','.join(map(str, excluded))}"
    met = rendezvous.TorchStore(store, config.environment().secret)
    ranks = [core.ranks[rank] for rank in kept]
    smaller = _core.regroup(core, met, name, kept.index(core.rank), ranks, timeout_s)
    smaller.set_timeout(timeout_s)
    ours.global_ranks_in_group, ours.group_name = smaller.ranks, cast("GroupName", name)
    return _owner(
        smaller, store, ours, default_group.register_shrunk(core, smaller, met, timeout_s)
    )


def _owner(
    core: _core.Group, store: Store, ours: compiled.Options, ended: Callable[[], None]
) -> compiled.Backend:
    backend: compiled.Backend = _module().Backend(core._capsule(), store, ours, True, ended)
    return backend


def _form(
    options: _DistributedBackendOptions,
    ours: compiled.Options,
    enter: Callable[[_core.Group, rendezvous.TorchStore, float], Callable[[], None]],
) -> compiled.Backend:
    """Connects the ranks of a new group; `enter` registers it beside the default group.

    A later group's keys are derived from those of torch's default group, if that is pycomm's: this
    is so for all of its ranks or for none.
    """
    timeout, place = ours._timeout, config.environment()
    inherited = _inherited(ours, place.encrypt)
    watch = gloo.Watch(options.group_rank, options.group_size) if ours.replaces else None
    store = rendezvous.TorchStore(options.store, place.secret, watch)
    parent = _engine_of_world() if options.global_ranks_in_group else None
    core = _connect(store, options, timeout, inherited, place, parent)
    if ours.replaces:
        gloo.log_formed(core)
    ended = enter(core, store, timeout.total_seconds())
    return _owner(core, options.store, ours, ended)


def replace(name: str, except_: str = "") -> None:
    """Makes pycomm's groups where the program asks torch for groups of gloo, from now on. The same
    on all ranks. `dist.get_backend()` still returns "gloo".

    Args:
        name: "gloo".
        except_: a pattern, as of fnmatch, of the groups that stay torch's: their description or
            name in torch; "": none.

    Raises:
        InvalidArgument: another name.
        Unsupported: there is no compiled module for this torch, or it makes groups in another way.
    """
    one_of("name", name, (gloo.GLOO,))
    gloo.replace(_in_place_of_gloo, plain_text("except_", except_), gloo.CALL)


def restore(name: str) -> None:
    """Gives later groups back to torch's gloo; groups that exist stay pycomm's.

    Raises:
        InvalidArgument: another name than "gloo".
    """
    one_of("name", name, (gloo.GLOO,))
    gloo.restore()


def _replace_as_configured() -> None:
    """replace() if PYCOMM_REPLACE asks for it. Logs a warning with the reason if that fails."""
    try:
        pattern = config.kept_from_replacement()
        if pattern is not None:
            gloo.replace(_in_place_of_gloo, pattern, gloo.VARIABLE)
    except Exception as error:  # of any kind: this torch may differ, and its import must not fail
        logging.getLogger("pycomm").warning("torch.distributed keeps its own gloo: %s", error)


def _in_place_of_gloo(
    options: _DistributedBackendOptions, is_default: bool
) -> compiled.Backend | compiled.ReconfigurableBackend:
    timeout = timedelta(seconds=_seconds(options.timeout))
    ours = _module().Options(timeout=timeout, thread_multiple=True, replaces=gloo.GLOO)
    ours.global_ranks_in_group = options.global_ranks_in_group
    ours.group_name = options.group_id
    if getattr(options, "enable_reconfigure", False):
        return _reconfigurable(options, ours)
    own = is_default and default_group.default_core() is None
    enter = default_group.register_core if own else default_group.register_backend
    return _form(options, ours, enter)


def register_backend(part: object, timeout_s: float) -> Callable[[], None]:
    """Makes abort() of the default group abort a subgroup of torch's split_group() too; returns a
    function that unregisters it. `part` is a capsule of a group.
    """
    return default_group.register_backend(_core.group_of(part), None, timeout_s)


def _options(given: object, timeout: timedelta) -> compiled.Options:
    if given is not None and not isinstance(given, _module().Options):
        raise InvalidArgument(
            f"invalid pg_options: got {type(given).__name__}, expected pycomm.torch_backend.Options"
        )
    ours: compiled.Options = _module().Options() if given is None else given
    ours._timeout = timeout
    return ours


def _inherited(
    ours: compiled.Options, encrypt: bool, shared: _core.Group | None = None
) -> dict[str, bool]:
    """What a new group has as its options say, else as the default group: so a subgroup of an
    encrypted group is never unencrypted by accident.
    """
    inherited = {"encrypt": encrypt, "thread_multiple": False}
    for name in inherited:
        given = getattr(ours, name)
        if shared is not None and given not in (None, default_group.core_has(shared, name)):
            raise InvalidArgument(
                f"Options({name}={given}), but torch's group uses the engine of pycomm.init, "
                f"which has {name}={not given}: pass the same value to both"
            )
        inherited[name] |= default_group.default_has(name)
        if given is not None:
            inherited[name] = given
    return inherited


def _seconds(timeout: timedelta | float) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def _engine_of_init(options: _DistributedBackendOptions) -> _core.Group | None:
    """The engine of pycomm's default group, if it has the ranks of torch's group."""
    core = default_group.default_core()
    if core is None or (core.rank, core.size) != (options.group_rank, options.group_size):
        return None
    return core


def _engine_of_world() -> _core.Group | None:
    """The engine of torch's default group; None if it is another backend's."""
    world = dist.group.WORLD
    assert world is not None, "of which a later group has a part of the ranks"
    for device in world._device_types:
        backend = coalescing.unwrapped(world._get_backend(device))
        if type(backend) is _module().Backend:
            return _core.group_of(backend._capsule())
    return None


def _connect(
    store: _core.Store,
    options: _DistributedBackendOptions,
    timeout: timedelta,
    inherited: dict[str, bool],
    place: config.Config,
    parent: _core.Group | None = None,
) -> _core.Group:
    """Forms the group through torch's store. Without a `parent` and a secret, rank 0 stores a new
    one there."""
    if options.group_size > 1:  # the program may set the ranks in torch, not in the environment
        config.take_secret()
    default_group.log_at(place.log)
    return rendezvous.connect(
        store,
        rank=options.group_rank,
        size=options.group_size,
        name=options.group_id or "default",
        timeout_s=timeout.total_seconds(),
        secret=place.secret,
        **inherited,
        transport=place.transport,
        address=place.address,
        route_hint=rendezvous.host_of(options.store) or place.master_host,
        reproducible=False,
        log=place.log != "warning",
        parent=parent,
        ranks=options.global_ranks_in_group if parent else [],
    )


def stats(process_group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """This rank's totals in a group since it was formed.

    Args:
        process_group: a group of torch's with the backend pycomm; None: the default group.

    Returns:
        calls, frames_sent, bytes_sent (payload), bytes_written (with frame headers: all bytes
        written to peers), bytes_received, and the seconds spent in calls. With replace() also
        groups_in_place_of_gloo: how many this process made.

    Raises:
        InvalidArgument: it is no group, or has other backends.
    """
    if process_group is not None:
        instance("process_group", process_group, dist.ProcessGroup, "a group of torch, or None")
    process_group = process_group or dist.group.WORLD
    if process_group is None:
        raise InvalidArgument("no process group: call torch.distributed.init_process_group first")
    names = []
    for device in process_group._device_types:
        backend = coalescing.unwrapped(process_group._get_backend(device))
        if isinstance(backend, _module().Backend):
            counted: dict[str, float] = backend.stats()
            if gloo.made():
                counted["groups_in_place_of_gloo"] = gloo.made()
            return counted
        names.append(f"{device.type}: {backend.name()}")
    raise InvalidArgument(
        f"invalid process group: its backend is {', '.join(names)}, expected pycomm"
    )


if "pycomm" not in dist.Backend.backend_list:
    # torch and programs choose a tensor's device from this list: only types that torch supports.
    dist.Backend.register_backend(
        "pycomm",
        create,
        extended_api=True,
        devices=["cpu", "cuda"] if torch.version.cuda or torch.version.hip else ["cpu"],
    )
# Here, and not in the entry point: if this module imports torch first, that runs before this line.
_replace_as_configured()
