"""What a rank has not sent: of DGC, TopK and Quantize. As plain values and tensors it is

    {"rank", "size", "hosts": [...], COLUMN: {name: [count]}, "owner_residual": {key: [places]}}
    {"version", "size", "ranks": [one rank's, ...]}                            of all ranks

The columns are "u" and "v" of DGC, otherwise "residual"; the last one is the residual. All are
flat, in the order of a parameter's memory. "owner_residual" is what this rank has not sent as an
owner. "hosts" has the host of each rank if the ranks of a host share their columns (HostGroups),
else nothing: then a host takes the place of a rank.

With H hosts and L of N ranks on this one, the mean over hosts equals the mean over ranks:

    a column of a host = H / N * the sum over its ranks;  of a rank = N / (H L) * that of its host
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pycomm import collectives
from pycomm._arguments import (
    Check,
    check_fields,
    check_version,
    list_of,
    mapping,
    refuse,
    whole,
)
from pycomm.compress.hierarchical import (
    CurrentHostGroups,
    HostGroups,
    average_copies,
    holder,
    hosts_of,
    rank_factor,
    saved_holder,
    saved_hosts,
)
from pycomm.errors import InvalidArgument
from pycomm.group import Group

VERSION = 1
OWNED = "owner_residual"
Tensors = Mapping[str, Tensor]  # by name of a parameter
# The ascending coordinates that an owner has of the parameters of a key, which are concatenated:
# (key, elements of each, rank and number of the owners). Those after the last element are padding.
Places = Callable[[str, Sequence[int], int, int], Tensor]


class Residual:
    """The columns of each parameter, and the owner's part.

    Args:
        owner: the class, for errors.
        columns: by column and name, flat tensors, which keep their memory.
        places: which elements an owner has.
        parts: as parts() returns them.

    Attributes:
        by_host: by rank, the host whose columns it holds; []: each rank holds its own.
    """

    def __init__(
        self,
        owner: str,
        columns: Mapping[str, dict[str, Tensor]],
        places: Places,
        parts: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._owner, self._columns, self._places = owner, columns, places
        self._given_parts = parts or {}
        self._owned: dict[str, Tensor] = {}
        self.by_host: list[int] = []

    @property
    def columns(self) -> Mapping[str, dict[str, Tensor]]:
        """By column and name; views."""
        return self._columns

    @property
    def owned(self) -> dict[str, Tensor]:
        """By key, the owner's part; a missing or empty one is 0."""
        return self._owned

    def parts(self) -> Mapping[str, Sequence[str]]:
        """The parameters of each key of the owner's part that is no parameter; none: all."""
        return self._given_parts

    @property
    def last(self) -> dict[str, Tensor]:
        """The residual of each parameter."""
        return list(self.columns.values())[-1]

    @property
    def tensors(self) -> list[Tensor]:
        """All columns of the parameters that have a residual."""
        return [column[name] for name in self.last for column in self.columns.values()]

    def squares(self) -> float:
        """The sum of the squares of the residual."""
        return sum(float(x.double().square().sum()) for x in self.last.values())

    def multiply(self, factor: float) -> None:
        """Multiplies all of it."""
        for x in (*self.tensors, *self.owned.values()):
            x.mul_(factor)

    def fold(self, group: Group) -> None:
        """Moves the owner's part of this rank in `group` into the residual; not collective."""
        holds = holder(self.by_host, group.rank, group.size)
        self._add_owned(self.last, self.owned, *holds)
        self._replace({})

    def at_hosts(self, current: CurrentHostGroups, group: Group) -> HostGroups:
        """Collective. The hosts of the ranks, which share columns from now on. After a failed step
        the copies of a host become equal."""
        hosts, failed = current.get(group)
        if not self.by_host:
            self.to_hosts(hosts, group)
        elif failed:
            average_copies(hosts, self.tensors)
        return hosts

    def to_hosts(self, hosts: HostGroups, group: Group) -> None:
        """Collective. Converts the columns from one for each rank to one for each host."""
        self.fold(group)
        average_copies(hosts, self.tensors, hosts.share)
        self.by_host = hosts.of_rank

    def to_ranks(self, group: Group) -> None:
        """Converts the columns of this rank from its host's to its own, without an owner's part, if
        necessary; not collective."""
        if self.by_host:
            self.fold(group)
            self.multiply(rank_factor(self.by_host, group.rank))
            self.by_host = []

    def save(self) -> dict[str, Any]:
        """Copies of this rank's tensors."""
        found = {key: _copies(column) for key, column in self.columns.items()}
        owned, order = self.owned, {name: i for i, name in enumerate(self.last)}
        keys = sorted(owned, key=lambda key: order.get(key, -1))  # independent of buckets
        found[OWNED] = {key: owned[key].clone() for key in keys}
        return {**found, "hosts": list(self.by_host)}

    def gather(self, group: Group, dst: int) -> list[dict[str, Any]] | None:
        """Collective. What save() returns on each rank, on `dst`; None elsewhere."""
        mine = self.save()
        found = [(key, name) for key in (*self.columns, OWNED) for name in mine[key]]
        counts = torch.tensor([len(mine[key][name]) for key, name in found])
        by_rank = collectives.all_gather(counts, group=group)
        ranks: list[dict[str, Any]] = [
            {**{key: {} for key in (*self.columns, OWNED)}, "hosts": list(self.by_host)}
            for _ in range(group.size)
        ]
        for (key, name), each in zip(found, by_rank.T.tolist(), strict=True):
            x = mine[key][name]
            padded = x.new_zeros(max(1, *each))
            padded[: len(x)] = x
            rows = collectives.gather(padded, dst, group=group)
            for rank, row in enumerate(() if rows is None else rows):
                ranks[rank][key][name] = row[: each[rank]].clone()
        return ranks if group.rank == dst else None

    def state(self, group: Group, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """The state of this rank, with further `numbers`."""
        where = {"version": VERSION, "rank": group.rank, "size": group.size}
        return {**where, **numbers, **self.save()}

    def state_of_all(
        self, group: Group, dst: int, numbers: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Collective. The states of all ranks on `dst`, None elsewhere."""
        found, where = self.gather(group, dst), {"version": VERSION, "size": group.size}
        if found is None:
            return None
        ranks = [{**where, "rank": r, **numbers, **one} for r, one in enumerate(found)]
        return {**where, "ranks": ranks}

    def load(self, sources: Sequence[Mapping[str, Any]], group: Group) -> None:
        """Replaces all by the state of one rank, this one, or by the mean over all ranks, with the
        owners' parts.

        Raises:
            InvalidArgument: they do not fit; nothing changes.
        """
        first, owned = sources[0], {}
        hosts = saved_hosts(first)
        for source in sources:
            self._check(source)
        whole = [self.folded(source) for source in sources]  # also checks the owners' parts
        if len(sources) > 1 or hosts not in ([], hosts_of(group)):
            sources, hosts = [self.of_rank(source) for source in whole], []
        elif self._fits(first):
            owned = first.get(OWNED, {})
        else:
            sources = whole
        new = {
            key: {
                name: _mean([one[key][name] for one in sources], like)
                for name, like in self._expected(key, first).items()
            }
            for key in self.columns
        }
        self._replace(owned, new)
        self.by_host = list(hosts)

    def folded(self, source: Mapping[str, Any]) -> Mapping[str, Any]:
        """A rank's state with the owner's part added to the residual."""
        last = list(self.columns)[-1]
        whole = _copies(source[last])
        self._add_owned(whole, source.get(OWNED, {}), *saved_holder(source))
        return {**source, last: whole, OWNED: {}}

    def of_rank(self, source: Mapping[str, Any]) -> Mapping[str, Any]:
        """A folded() state with the columns of the rank instead of its host."""
        hosts = saved_hosts(source)
        if not hosts:
            return source
        factor = rank_factor(hosts, source["rank"])
        shared = source[list(self.columns)[-1]]
        scaled = {
            key: {n: x * factor if n in shared else x for n, x in source[key].items()}
            for key in self.columns
        }
        return {**source, **scaled, "hosts": []}

    def _expected(self, column: str, source: Mapping[str, Any]) -> Tensors:
        """Tensors like those of this column that a state must have."""
        return self.columns[column]

    def _check(self, source: Mapping[str, Any]) -> None:
        """Raises InvalidArgument unless the columns of a state fit the parameters."""
        for key in self.columns:
            for name, like in self._expected(key, source).items():
                found = source[key].get(name)
                if found is None or found.shape != like.shape:
                    got = "none" if found is None else f"shape {tuple(found.shape)}"
                    raise InvalidArgument(
                        f"{self._owner}: invalid {key} of {name!r} in the state: got {got}, "
                        f"expected ({len(like)},): it is of another model, other names or another "
                        "min_count"
                    )

    def _fits(self, source: Mapping[str, Any]) -> bool:
        """Whether the owner's part in a state has keys of this object, of the same parameters."""
        last, parts = list(self.columns)[-1], self.parts()
        here, there = self._expected(last, source), source[last]
        return all(
            key in (parts or here)
            and self._members(key, here, parts) == self._members(key, there, parts)
            for key in source.get(OWNED, {})
        )

    def _members(
        self, key: str, names: Iterable[str], parts: Mapping[str, Sequence[str]]
    ) -> list[str]:
        """The parameters of a key, among those with these names; all if none are given for it."""
        found = list(names)
        return [key] if key in found else list(parts.get(key, ())) or found

    def _add_owned(self, residual: Tensors, owned: Tensors, rank: int, size: int) -> None:
        parts = self.parts()
        for key, part in owned.items():
            if not len(part):
                continue
            members = self._members(key, residual, parts)
            counts = [len(residual[name]) for name in members]
            at = self._places(key, counts, rank, size).to(part.device)
            if len(at) != len(part):
                raise InvalidArgument(
                    f"{self._owner}: invalid owner_residual of {key!r}: got {len(part)} elements, "
                    f"expected {len(at)}, which fit the residual in the state"
                )
            for name, (places, values) in zip(members, cut(counts, at, part), strict=True):
                residual[name][places] += values.to(residual[name].dtype)

    def _replace(self, owned: Tensors, columns: Mapping[str, Tensors] | None = None) -> None:
        """Replaces the owner's part, and the columns if they are given, by copies."""
        for key, column in (columns or {}).items():
            for name, x in column.items():
                self.columns[key][name].copy_(x)
        self._owned = _copies(owned)


def cut(counts: Sequence[int], indices: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each of several arrays the elements in it: indices, from its first element, and values.

    Args:
        counts: elements of the arrays.
        indices, values: of all arrays, concatenated; ascending. Those after the last are left out.
    """
    ends = list(itertools.accumulate(counts, initial=0))
    at = torch.searchsorted(indices, indices.new_tensor(ends)).tolist()
    for offset, first, last in zip(ends, at, at[1:], strict=False):
        yield indices[first:last] - offset, values[first:last]


class Transaction:
    """What a step changed, until it is complete.

    A change exchanges the saved and the present values, so calling it twice changes nothing.

    Attributes:
        undone: undo() was called, and not redo().
    """

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self.undone = False

    def record(self, change: Change) -> None:
        """Records a change that was made."""
        self._changes.append(change)

    def undo(self) -> None:
        """Restores what was there before, once."""
        if not self.undone:
            for change in reversed(self._changes):
                change.exchange()
        self.undone = True

    def redo(self) -> None:
        """Makes the changes again if they were undone, because another rank has completed the
        step."""
        if self.undone:
            for change in self._changes:
                change.exchange()
        self.undone = False

    def commit(self, unused: Collection[Any] = ()) -> None:
        """The step is complete: it cannot be undone any more. `unused` parameters, as changes name
        them, are as before."""
        for change in self._changes if unused else ():
            change.keep(unused)
        self._changes, self.undone = [], False


class Change:
    """The base of a change."""

    def exchange(self) -> None:
        """Exchanges the saved and the present values."""
        raise NotImplementedError

    def keep(self, parameters: Collection[Any]) -> None:
        """Restores those of these parameters that the change saved as a whole."""


class Whole(Change):
    """A change of whole tensors of one parameter, which are saved now."""

    def __init__(self, parameter: Any, tensors: Sequence[Tensor]) -> None:
        self._parameter, self._tensors = parameter, tensors
        self.saved = [x.clone() for x in tensors]

    def exchange(self) -> None:
        present = [x.clone() for x in self._tensors]
        for x, saved in zip(self._tensors, self.saved, strict=True):
            x.copy_(saved)
        self.saved = present

    def keep(self, parameters: Collection[Any]) -> None:
        if self._parameter in parameters:
            self.exchange()


class Elements(Change):
    """A change of selected elements.

    Args:
        columns: lists of flat arrays, which are concatenated.
        indices: of the groups, ascending; an array has its own groups, the last one may be shorter.
        saved: for each column the elements of these groups before, [k * group]; those after the
            end of an array do not count.
        group: elements of a group.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[Tensor]],
        indices: Tensor,
        saved: Sequence[Tensor],
        group: int = 1,
    ) -> None:
        self._columns, self._indices, self._group = columns, indices, group
        self._saved = list(saved)

    def exchange(self) -> None:
        group, arrays = self._group, self._columns[0]
        counts = [-(-len(x) // group) for x in arrays]
        within = torch.arange(group, device=self._indices.device)
        places = [
            (found.long()[:, None] * group + within).flatten()
            for found, _ in cut(counts, self._indices, self._indices)
        ]
        for i, column in enumerate(self._columns):
            parts = torch.split(self._saved[i], [len(at) for at in places])
            self._saved[i] = torch.cat(
                [_exchanged(*row) for row in zip(column, places, parts, strict=True)]
            )


def _exchanged(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Writes values to the elements of `x` at these places, and returns what was there; nothing
    behind its end."""
    present, there = torch.zeros_like(values), places < len(x)
    present[there] = x[places[there]]
    x[places[there]] = values[there]
    return present


class Entry(Change):
    """A change of one entry of a dictionary: `new` takes the place of what is there now."""

    def __init__(self, entries: dict[str, Tensor], key: str, new: Tensor) -> None:
        self._entries, self._key = entries, key
        self._saved: Tensor | None = new
        self.exchange()

    def exchange(self) -> None:
        present = self._entries.pop(self._key, None)
        if self._saved is not None:
            self._entries[self._key] = self._saved
        self._saved = present


def sources_of(
    saved: Mapping[str, Any],
    group: Group,
    owner: str,
    needed: Mapping[str, Check],
    more: Mapping[str, Check],
) -> list[Mapping[str, Any]]:
    """The saved states of single ranks that this rank loads: its own, or all of them.

    Args:
        saved: of one rank, or of all ranks.
        group: the ranks that load it.
        owner: the class, for errors.
        needed, more: values of a rank's state, and those that older states lack.

    Raises:
        InvalidArgument: another version, or the state of another rank or number of ranks, or it
            lacks values.
    """
    check_version(owner, saved, VERSION)
    needed = {"rank": whole, "size": whole, **needed}
    more = {"hosts": list_of(whole), **more}
    if "ranks" in saved:
        check_fields("state", saved, {"size": whole, "ranks": list_of(mapping)})
        ranks: list[Mapping[str, Any]] = saved["ranks"]
        if len(ranks) != saved["size"] or not ranks:
            refuse("state['ranks']", len(ranks), f"size={saved['size']} states, and at least one")
        mine = [ranks[group.rank]] if saved["size"] == group.size else ranks
        for one in mine:
            _check_source(one, needed, more)
        return mine
    _check_source(saved, needed, more)
    if (saved["size"], saved["rank"]) != (group.size, group.rank):
        raise InvalidArgument(
            f"{owner}: state of rank {saved['rank']} of {saved['size']} on rank {group.rank} of "
            f"{group.size}: each rank must load its own state, or all that of gather_state()"
        )
    return [saved]


def _check_source(
    source: Mapping[str, Any], needed: Mapping[str, Check], more: Mapping[str, Check]
) -> None:
    check_fields("state", source, needed, more)
    size, hosts = source["size"], saved_hosts(source)
    if source["rank"] >= size or len(hosts) not in (0, size) or max(hosts, default=0) >= size:
        raise InvalidArgument(
            f"invalid state: got rank {source['rank']} of {size} with {len(hosts)} hosts"
        )


def _copies(tensors: Tensors) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in tensors.items()}


def _mean(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """The mean, in float64; a single one is returned as is."""
    if len(tensors) == 1:
        return tensors[0]
    total = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
    for x in tensors:
        total += x.to(like.device)
    return total / len(tensors)
