"""The default group of the process, which every call without `group=` uses, and of its threads.

`init` makes it. A thread can have a default group of its own: `pycomm.testing` runs ranks as
threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pycomm import _core, config
from pycomm import _secret as secrets
from pycomm._arguments import also_named, flag, integer, one_of, path, refuse, seconds
from pycomm._bootstrap import elastic_store, launcher_watch, rendezvous
from pycomm._bootstrap.elastic_store import Elastic
from pycomm._bootstrap.joining import Answer, Joiner
from pycomm.errors import GroupBroken, InvalidArgument
from pycomm.group import DEFAULT_TIMEOUT_S, Group, abort_all, elastic_group, on_shrink, serving

DEFAULT_HEARTBEAT_S = 10.0


class _State:
    """The default group of the process."""

    group: Group | None = None
    adopted: bool = False  # torch owns the engine and closes it
    ended: str = ""  # why there is no group any more
    by_thread: bool = False  # a thread has, or had, a default group of its own
    lock = threading.RLock()


def _set(group: Group | None, *, adopted: bool = False) -> None:
    """Sets the default group of the process. The core finds it unless threads have their own."""
    _state.group, _state.adopted = group, adopted
    _core.set_default_group(None if group is None or _state.by_thread else group.core)


def _separate_threads() -> None:
    """From now on each call looks for a default group of its thread."""
    _state.by_thread = True
    _core.set_default_group(None)


class _Thread(threading.local):
    """Thread-local groups. Class attributes are the defaults: a failed lookup costs half a small
    call."""

    own: Sequence[Group] = ()  # the first is the thread's default group
    forced: Group | None = None  # the default within as_thread_default


_state = _State()
_thread = _Thread()


@also_named(world_size="size")
def init(  # noqa: PLR0913 - all have defaults
    *,
    rank: int | None = None,
    size: int | None = None,
    master: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    transport: str | None = None,
    secret: str | None = None,
    encrypt: bool | None = None,
    reproducible: bool = False,
    heartbeat_s: float = DEFAULT_HEARTBEAT_S,
    elastic: str | None = None,
    thread_multiple: bool = False,
) -> Group:
    """Forms the default group. Collective over the processes of the run.

    The environment gives each process its rank; or the program does, with `rank` and `size`. A
    second call returns the same group and ignores its arguments. After torch's
    init_process_group("pycomm") the group uses that backend's engine.

    Args:
        rank, size: the rank of this process, and their number; None: those of the environment.
        master: "host:port", where rank 0 serves the store; the same on every rank. Needed if
            `size` is given, and above 1.
        timeout_s: limit in seconds of the forming and of every call without one of its own.
        transport: "shm" or "tcp": this one only; None: PYCOMM_TRANSPORT, or the best for each pair.
        secret: the run's shared secret; None: PYCOMM_SECRET.
        encrypt: encrypt and authenticate traffic between hosts (AES-256-GCM), also in groups made
            by split() and shrink(). Needs OpenSSL 3 and, on several hosts, a secret. The same on
            every rank. None: PYCOMM_ENCRYPT, or no.
        reproducible: add in rank order for every size, so that bits depend on the inputs alone.
        heartbeat_s: a peer without a heartbeat for so many seconds counts as lost: it is stopped or
            its host failed. A busy rank sends heartbeats, also while it holds the GIL. 0: no limit,
            for debuggers. The same on every rank.
        elastic: a path for a file of this run: makes the group elastic, so that Group.replace and
            Group.grow can add processes, and any rank may die. Needs a secret. Each rank listens
            for clients that know it. The ranks' addresses are written to the file, which the hosts
            may share. `pycomm launch` sets the path if it replaces ranks. init() of a new or spare
            process then waits until the group needs it, without a limit.
        thread_multiple: several threads may call at once, as with MPI_THREAD_MULTIPLE, also in
            groups made by split() and shrink(). Their collectives run one after another, first
            come, first served, so all ranks need the same order. Messages do not wait for them.
            Otherwise a second thread gets InvalidArgument.

    Raises:
        InvalidArgument: an argument or variable is invalid; or `encrypt` or `thread_multiple`, but
            the default group exists without it.
        Timeout: not all ranks joined; the text names the missing ones.
        PeerLost, Mismatch: a rank died, or was started with other options.
        Unsupported: `encrypt` without OpenSSL 3, or on several hosts without a secret.
        SystemExit: `pycomm launch` started this process to replace a rank, and the training ended
            without it; the exit status is 0.
    """
    with _state.lock:
        found = _find()
        encrypt = None if encrypt is None else flag("encrypt", encrypt)
        thread_multiple = flag("thread_multiple", thread_multiple)
        if found is not None:
            _check_found(found, encrypt=encrypt, thread_multiple=thread_multiple)
            return found
        timeout_s = seconds("timeout_s", timeout_s)
        heartbeat_s = seconds("heartbeat_s", heartbeat_s, zero=True)
        reproducible = flag("reproducible", reproducible)
        if transport is not None:
            one_of("transport", transport, config.TRANSPORTS)
        if elastic is not None:
            elastic = path("elastic", elastic)
        if secret is not None:
            secrets.check(secret, "secret")
        place = config.Place.of(rank, size, master)
        here = config.environment(secret=secret, place=place)
        if encrypt is not None:
            here = dataclasses.replace(here, encrypt=encrypt)
        here = dataclasses.replace(here, transport=transport or here.transport)
        if elastic is not None:
            here = dataclasses.replace(here, elastic=elastic)
        if elastic is None and config.joins_elastic_group():
            group = _join(here, here.rank, timeout_s, launched=True)
        else:
            if place is None:
                _check_launcher(here)
            options = {
                "reproducible": reproducible,
                "heartbeat_s": heartbeat_s,
                "encrypt": here.encrypt,
                "thread_multiple": thread_multiple,
            }
            group = _form(here, timeout_s, options)
        _set(group)
        return group


def join(
    file: str,
    *,
    rank: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    secret: str | None = None,
) -> Group:
    """Joins an elastic group, whose ranks call Group.replace or Group.grow; it becomes the default
    group. The options of the group apply.

    Args:
        file: that of init(elastic=FILE).
        rank: the only rank to take, as in Group.ranks; None: the lowest that is free, in order of
            arrival.
        timeout_s: limit in seconds of the wait and of every call without one of its own.
        secret: the run's shared secret; None: PYCOMM_SECRET.

    Raises:
        InvalidArgument: an argument is invalid; or the process has a default group.
        Timeout: the ranks did not call replace() or grow() in time.
        PeerLost: no rank of the group lives, or none has this secret.
    """
    with _state.lock:
        if _find() is not None:
            raise InvalidArgument("join: this process has a default group: call shutdown() before")
        timeout_s, file = seconds("timeout_s", timeout_s), path("file", file)
        rank = None if rank is None else integer("rank", rank, 0, 2**31 - 1)
        if secret is not None:
            secrets.check(secret, "secret")
        here = config.environment(secret=secret)
        group = _join(dataclasses.replace(here, elastic=file), rank, timeout_s)
        _set(group)
        return group


def _check_found(found: Group, **wanted: bool | None) -> None:
    """That the default group has what the program asks for."""
    for name, value in wanted.items():
        if value and not group_has(found, name):
            raise InvalidArgument(
                f"{name}=True, but the default group exists and has {name}=False: "
                f"pass {name}=True where it is made"
            )


def _check_launcher(here: config.Config) -> None:
    if here.size == 1 and (found := config.unknown_launcher()):
        raise InvalidArgument(
            f"init: a launcher started several processes ({found}), but sets no variables that "
            "pycomm reads: set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, pass "
            "rank=, size= and master=, or start the program with pycomm launch or torchrun"
        )


def _form(here: config.Config, timeout_s: float, options: dict[str, Any]) -> Group:
    log_at(here.log)
    _core.check_address(here.address)
    end = time.monotonic() + timeout_s
    if here.elastic:
        _require_secret(here)
    store = rendezvous.find_store(here, timeout_s)
    core = rendezvous.connect(
        store,
        rank=here.rank,
        size=here.size,
        name="world",
        timeout_s=max(0.1, end - time.monotonic()),
        **_own_options(here),
        **options,
    )
    core.set_timeout(timeout_s)  # of its calls; forming used the remaining time
    elastic = _elastic(here, core, options) if here.elastic else None
    store.all_ranks_connected()
    launcher_watch.start(abort_all)
    if elastic is None:
        made = Group(core, store, timeout_s)
        if here.rank == 0 and rendezvous.is_served_by_rank_0(here, store):
            serving.add(made)
        return made
    return elastic_group(core, elastic, timeout_s)


def _elastic(here: config.Config, core: _core.Group, options: dict[str, Any]) -> Elastic:
    """Serves this rank's store; when it returns, all ranks know the stores of all."""
    loopback = not here.master_host or rendezvous.is_loopback(here.master_host)
    own, server = elastic_store.serve(here.master_host, loopback, here.secret, 0)
    servers = elastic_store.exchange_servers(core, server)
    return Elastic(here.elastic, here.secret, servers, own, options)


def _join(
    here: config.Config, rank: int | None, timeout_s: float, *, launched: bool = False
) -> Group:
    """Joins an elastic group, as joining.Joiner."""
    log_at(here.log)
    _core.check_address(here.address)
    _require_secret(here)

    def connect(store: _core.Store, given: Answer) -> _core.Group:
        if here.encrypt and not given.options["encrypt"]:
            raise InvalidArgument("init: encrypt=True, but the elastic group is not encrypted")
        return rendezvous.connect(
            store,
            rank=given.rank,
            size=len(given.ranks),
            ranks=given.ranks,
            name=given.name,
            timeout_s=given.form_s,
            **_own_options(here),
            **given.options,
        )

    end = time.monotonic() + timeout_s
    joiner = Joiner(here.elastic, here.secret, rank, end, connect, launched=launched)
    core = joiner.run()
    core.set_timeout(timeout_s)
    launcher_watch.start(abort_all)
    return elastic_group(core, joiner.elastic, timeout_s)


def _require_secret(here: config.Config) -> None:
    if not here.secret:
        raise InvalidArgument(
            "init: an elastic group needs a secret: set PYCOMM_SECRET to the same on all ranks, "
            'made by python -c "import secrets; print(secrets.token_hex(32))"'
        )


def _own_options(here: config.Config) -> dict[str, Any]:
    """Arguments of rendezvous.connect() that need not be equal on all ranks, and the secret."""
    return {
        "secret": here.secret,
        "transport": here.transport,
        "address": here.address,
        "route_hint": here.master_host,
        "log": here.log != "warning",
    }


def log_at(level: str) -> None:
    """Sends pycomm's log messages to stderr, unless the program has configured logging."""
    logger = logging.getLogger("pycomm")
    if level == "warning" or logger.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("pycomm: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())


def shutdown() -> None:
    """Closes the default group; a second call has no effect. An engine that torch owns stays
    open."""
    with _state.lock:
        group, adopted = _state.group, _state.adopted
        _set(None)
        _thread.own = ()
        if group is not None:
            _state.ended = "the default group was closed by pycomm.shutdown()"
            if not adopted:
                group.close()


def is_initialized() -> bool:
    """Whether there is a default group."""
    return _find() is not None


def _replace(old: Group, new: Group) -> None:
    """Makes `new` the default wherever `old` was it."""
    with _state.lock:
        if _state.group is old:
            _set(new)
        if _thread.forced is old:
            _thread.forced = new
        elif _thread.own and _thread.own[0] is old:
            _thread.own = [new]


on_shrink.append(_replace)


def _find() -> Group | None:
    if _thread.forced is not None:
        return _thread.forced
    own = _thread.own
    return own[0] if own else _state.group


def default() -> Group:
    """The default group. Raises GroupBroken after shutdown, InvalidArgument before init."""
    group = _find()
    if group is None:
        if _state.ended:
            raise GroupBroken(f"{_state.ended}; pycomm.init() makes a new one")
        raise InvalidArgument("there is no default group yet: call pycomm.init() first")
    return group


def chosen(group: Group | None) -> Group:
    """The group of a call: the default group for None. Raises InvalidArgument for another object,
    and as default().
    """
    if group is None:
        return default()
    if not isinstance(group, Group):
        refuse("group", group, "a pycomm.Group or None")
    return group


def rank() -> int:
    """This process's rank in the default group."""
    return default().rank


def size() -> int:
    """The number of ranks of the default group."""
    return default().size


def local_rank() -> int:
    """This process's rank among the default group's ranks on this host."""
    return default().core.local_rank


def local_size() -> int:
    """The number of the default group's ranks on this host."""
    return default().core.local_size


def host_count() -> int:
    """The number of hosts of the default group."""
    return default().core.host_count


def register_core(core: _core.Group, store: _core.Store, timeout_s: float) -> Callable[[], None]:
    """Makes torch's engine the default group, or that of this thread if the process has one already
    (ranks as threads); returns a function that unregisters it.
    """
    group = Group(core, store, timeout_s)
    launcher_watch.start(abort_all)
    own: list[Group] = [group]
    with _state.lock:
        if _state.group is None:
            _set(group, adopted=True)
        else:
            _separate_threads()
        _thread.own = own
    return lambda: _unregister(group, own)


def _unregister(group: Group, own: list[Group]) -> None:
    with _state.lock:
        own.clear()
        if _state.group is group:
            _set(None)
            _state.ended = "torch's process group was destroyed"


def register_shrunk(
    core: _core.Group, smaller: _core.Group, store: _core.Store, timeout_s: float
) -> Callable[[], None]:
    """Registers the engine of torch's shrink_group(): as the default group if `core` was it, else
    as register_backend(). Returns a function that unregisters it.
    """
    old = _find()
    if old is None or old.name != core.name:
        return register_backend(smaller, store, timeout_s)
    group = Group(smaller, store, timeout_s)
    with _state.lock:
        _replace(old, group)
        _state.adopted |= _state.group is group
        own = _thread.own if isinstance(_thread.own, list) else []
    return lambda: _unregister(group, own)


def register_backend(
    core: _core.Group, store: _core.Store | None, timeout_s: float
) -> Callable[[], None]:
    """Makes abort() of the default group abort the engine of torch's new_group() or split_group()
    too; returns a function that unregisters it.
    """
    held = [Group(core, store, timeout_s)]
    if (group := _find()) is not None:
        group._adopt_subgroup(held[0])
    return held.clear


def default_core() -> _core.Group | None:
    """The engine made by `init` or `run_ranks`, for torch_backend to share; None if there is
    none."""
    group = _thread.forced or (None if _state.adopted else _state.group)
    return None if group is None else group.core


def group_has(group: Group, option: str) -> bool:
    """Whether the group has this option of init(): encrypt or thread_multiple."""
    return core_has(group.core, option)


def core_has(core: _core.Group, option: str) -> bool:
    """The same of an engine."""
    return core.encrypted if option == "encrypt" else core.thread_multiple


def default_has(option: str) -> bool:
    """The same of the default group, made by torch or by pycomm."""
    group = _thread.forced or _state.group
    return group is not None and not group.core.forked and group_has(group, option)


@contextlib.contextmanager
def as_thread_default(group: Group) -> Iterator[None]:
    """A context in which `group` is the default of this thread only."""
    _separate_threads()
    _thread.forced = group
    try:
        yield
    finally:
        _thread.forced = None
