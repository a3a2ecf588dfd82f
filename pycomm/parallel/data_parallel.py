"""pycomm.DataParallel: the wrapper of the user's module. reducer.py handles the gradients.

docs/training.md describes its guarantees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pycomm import collectives
from pycomm._arguments import also_named, flag, one_of, refuse
from pycomm._core_api import arrays
from pycomm._quantize import Quantize
from pycomm._training.arguments import check_module
from pycomm._training.coalesced import bcast_list_, bcast_value
from pycomm._training.communicators import CommunicatorPool
from pycomm._training.parameters import check_initialized
from pycomm.compress.dgc import DGC, compressor_of
from pycomm.compress.quantized_gradients import QuantizedGradients, exchange_of
from pycomm.default_group import chosen
from pycomm.elastic.change import Membership, ShrinkResult
from pycomm.elastic.state import check_replicated, check_stateful, load_copy
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import DEFAULT_WAIT_S, Group
from pycomm.parallel.batch_norm import SyncBatchNorm
from pycomm.parallel.buckets import Limits, slots_of
from pycomm.parallel.exchange import DenseExchange, Exchange
from pycomm.parallel.reducer import Reducer, check_unwrapped
from pycomm.parallel.replicas import check_equal, check_layout


class DataParallel(nn.Module):
    """A module whose gradients are averaged over all ranks during the backward pass.

        model = pycomm.DataParallel(model)
        loss(model(x), y).backward()      # gradients are the mean over all ranks
        optimizer.step()

    Gradients are divided once, after the sum. They are views into communication buckets, so set or
    scale them in place. `state_dict()` and `load_state_dict()` are those of the module.

    Args:
        module: any module with parameters and buffers on the CPU or on CUDA devices; its forward
            gets all arguments.
        compression: a pycomm.Quantize, or a pycomm.QuantizedGradients of the module, for any
            optimizer; a pycomm.DGC made for its SGD; None sends gradients uncompressed.
        bucket_mb: maximum MB of gradients in one call; "auto": a tenth of all, from 1 to 64.
        bucket_layers: maximum layers (modules that own parameters) in one call; None: unlimited.
        lanes: communicators used in turn, 1 to 64; None: 1 on one host, 2 between hosts.
        hierarchical: reduce within hosts, between hosts, then within hosts; ignored on one host.
        init: "broadcast" copies rank 0's parameters and buffers to all ranks; "check" raises
            Mismatch if they differ.
        broadcast_buffers: copy rank 0's buffers to all ranks before each forward pass that is
            followed by an exchange; passes under no_grad or no_sync do not communicate.
        group: the ranks; None: the default group. If this process joined it, the constructor makes
            no calls; replace() must be called first.
        find_unused_parameters: parameters may have no gradient. If no rank uses a parameter it
            keeps its gradient; if another rank uses it, its gradient counts as zero here. Otherwise
            such a parameter raises InvalidArgument at the end of backward.

    Attributes:
        compression: the DGC or QuantizedGradients in use, with its state; None: none.

    Raises:
        InvalidArgument: an argument is invalid, or another live DataParallel has a parameter of
            the module.
        Unsupported: parameters or buffers on another device.
        Mismatch: on every rank: names, shapes, dtypes or kinds of device (with "check": values)
            differ.
    """

    @also_named(
        bucket_cap_mb="bucket_mb",
        comm_buffer_size="bucket_mb",
        device_ids="move the module to its device before wrapping it",
        output_device="the output stays on the device of the module",
        process_group="pass a pycomm group as group=",
        gradient_as_bucket_view="gradients are always views of the buckets",
        static_graph="it is not needed",
    )
    def __init__(
        self,
        module: nn.Module,
        compression: Quantize | QuantizedGradients | DGC | None = None,
        bucket_mb: float | str = 25,
        bucket_layers: int | None = None,
        lanes: int | None = None,
        hierarchical: bool = False,
        init: str = "broadcast",
        broadcast_buffers: bool = True,
        group: Group | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        check_module("module", module)
        one_of("init", init, ("broadcast", "check"))
        hierarchical = flag("hierarchical", hierarchical)
        broadcast_buffers = flag("broadcast_buffers", broadcast_buffers)
        find_unused_parameters = flag("find_unused_parameters", find_unused_parameters)
        group = chosen(group)
        known = DGC, Quantize, QuantizedGradients
        if compression is not None and not isinstance(compression, known):
            refuse(
                "compression",
                compression,
                "None or a DGC for the optimizer: compression=pycomm.DGC(optimizer); for any "
                "optimizer: compression=pycomm.Quantize()",
            )
        check_initialized("DataParallel", module.named_parameters())
        if isinstance(compression, Quantize):
            compression = QuantizedGradients(module.named_parameters(), compression)
        self.compression = compression
        slots = slots_of(module)
        check_unwrapped(slots)
        limits = Limits.of(bucket_mb, bucket_layers, sum(slot.bytes for slot in slots))
        self.module = module
        self._broadcast_buffers = broadcast_buffers
        self._joining = False
        self._source = 0  # the rank whose buffers are used
        for name, tensor in self._named_tensors():
            if not (tensor.is_cpu or arrays.on_gpu(tensor)):
                raise Unsupported(
                    f"DataParallel: {name!r} is on {tensor.device}, which is not supported: call "
                    "model.cpu() or model.cuda()"
                )
        self._membership = Membership(group)
        new = self._membership.new
        self._pool = CommunicatorPool(group, lanes, hierarchical, split=not new)
        if not new:
            check_layout(self._named_tensors(), group)
            if init == "check":
                check_equal(self._named_tensors(), group)
            else:
                self._broadcast_all(0)
        exchange: Exchange = DenseExchange(self._pool)
        if compression is not None:
            compressor = (
                compressor_of(compression)
                if isinstance(compression, DGC)
                else exchange_of(compression)
            )
            named = {slot.name: slot.parameter for slot in slots if not slot.sparse}
            others = {n: p for n, p in module.named_parameters() if n not in named}
            compressor.attach(named, self._pool, others)
            exchange = compressor
        for slot in slots:
            slot.kind = not slot.sparse and exchange.compresses(slot.parameter)
        self._exchange = exchange
        self._reducer = Reducer(slots, exchange, limits, self._pool, find_unused_parameters)

    @property
    def _group(self) -> Group:
        return self._pool.group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; first broadcasts buffers, if gradients will be exchanged.

        Raises:
            InvalidArgument: since the constructor a parameter was added or replaced, or got
                requires_grad=True.
            Error: as pycomm.broadcast, if it communicates.
        """
        self._membership.check("DataParallel")
        if self._reducer.sync and torch.is_grad_enabled():
            if self._joining:
                self._source = self._highest_active_rank(active=True)
            self._reducer.check_known(self.module)
            self._begin_pass()
            found = self.module(*args, **kwargs)
            self._reducer.forwards += self.module.training  # one rank may evaluate by itself
            return found
        return self.module(*args, **kwargs)

    def _begin_pass(self) -> None:
        self._reducer.prepare()
        # Autograd must not see the change: an earlier forward pass may wait for its backward.
        buffers = [buffer.data for buffer in self.module.buffers()]
        if self._broadcast_buffers and buffers:
            bcast_list_(buffers, self._source, self._group)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context without gradient exchange: gradients accumulate on each rank, and the next pass
        outside exchanges the sum.

        As in torch, both forward and backward passes must be inside.
        """
        before, self._reducer.sync = self._reducer.sync, False
        try:
            yield
        finally:
            self._reducer.sync = before

    @contextlib.contextmanager
    def join(self, *others: Any) -> Iterator[None]:
        """A context for ranks with different numbers of batches: a rank that is done takes part in
        the others' passes until all are done.

        Gradients of a rank without data count as zero in the mean over all ranks. At the end all
        ranks have the parameters and buffers of the last rank with data, and the states of
        `others`. DGC restores its own state and its scaler's.

        Args:
            others: the optimizer, a GradScaler, a scheduler, whose steps a rank without data
                missed; any objects with state_dict() and load_state_dict().

        Raises:
            InvalidArgument: one of `others` has no state_dict() or load_state_dict().
            Unsupported: the module has a SyncBatchNorm layer, whose passes every rank makes: give
                it empty batches, without join, on the ranks that are done.
            Error: as pycomm.all_reduce, at the end.
        """
        if self._synchronized_layers():
            raise Unsupported(
                "join: a rank without data cannot take part in the passes of SyncBatchNorm: leave "
                "out join, and pass empty batches on the ranks that are done"
            )
        check_stateful(others)
        self._joining = True
        try:
            yield
            while (source := self._highest_active_rank(active=False)) >= 0:
                self._source = source
                self._begin_pass()
                self._reducer.idle_pass()
            self._broadcast_all(self._source)
            self._exchange.sync_from(self._source)
            for other in others:
                other.load_state_dict(bcast_value(other.state_dict(), self._source, self._group))
        finally:
            self._joining, self._source = False, 0

    def shrink(self, *others: Any, timeout_s: float | None = None) -> ShrinkResult:
        """Continues with the surviving ranks after a rank was lost. Collective over the survivors.

        Afterwards the last step is complete on all survivors or on none. If one completed it, the
        others get its parameters, buffers and the states of `others` (the optimizer, a scheduler;
        see join), and DGC counts its part of the step as sent. Gradients are dropped; DGC keeps the
        step's gradients in its residual. If another rank dies meanwhile PeerLost is raised: call
        again.

        Args:
            others: objects with state_dict() and load_state_dict() that are the same on all ranks.
            timeout_s: as of Group.shrink.

        Returns:
            The survivors, and the number of steps that all have completed.

        Raises:
            InvalidArgument: `timeout_s` is not above 0, or one of `others` has no state_dict() or
                load_state_dict().
            GroupBroken, PeerLost, Timeout: as of Group.shrink.
        """
        return self._resume(lambda group: group.shrink(timeout_s), others)

    def replace(
        self, *others: Any, timeout_s: float | None = None, wait_s: float = DEFAULT_WAIT_S
    ) -> ShrinkResult:
        """As shrink(), but new processes take the ranks that were lost. Collective over the
        survivors and the new processes.

        A new process makes the same model, wrapper and `others` in the group that it joined: the
        constructor makes no calls then. Its first replace() gets everything else. Several survivors
        send at once; SHA-256 says that all are equal. Residuals of a new rank, and DGC's velocity
        of compressed parameters, are 0.

        If the group was replaced already, by Group.replace, Group.grow or another wrapper, that
        group is used.

        Args:
            others: as of shrink(); the same objects on all ranks.
            timeout_s, wait_s: as of Group.replace.

        Returns:
            The new group, and the number of steps that all have completed.

        Raises:
            InvalidArgument: the group is not elastic, an argument is invalid, or all ranks joined.
            Unsupported: the optimizer is sharded (ZeRO); nothing was changed.
            Mismatch: on every rank: the model of a new process differs.
            GroupBroken, PeerLost, Timeout: as of Group.replace.
        """
        return self._resume(lambda group: group.replace(timeout_s, wait_s), others)

    def _resume(self, make: Callable[[Group], Group], others: Sequence[Any]) -> ShrinkResult:
        """Continues in the group that `make` makes of this one. Collective over it."""
        check_replicated(others)
        before, reducer = self._group, self._reducer
        change = self._membership.change(make, (reducer.passes,))
        self._pool.use(change.group)
        for layer in self._synchronized_layers():
            if layer.group is before:
                layer.group = self._group
        if change.new:
            check_layout(self._named_tensors(), self._group)
        load_copy([tensor for _, tensor in self._named_tensors()], others, change)
        (step,) = change.counts
        lost = self._exchange.resume(change, reducer.passes < step)
        reducer.resume(step, change.source)
        self._membership.complete()
        return change.result(step, lost)

    def _highest_active_rank(self, active: bool) -> int:
        """The highest rank that has data; -1 if none. Collective. A rank without data gets the loss
        scale of the others, whose scalers change it."""
        scale = self._exchange.scale
        mine = [self._group.rank, scale.mine or 1.0] if active else [-1, 0.0]
        word = torch.tensor(mine, dtype=torch.float64)
        collectives.all_reduce(word, "max", group=self._group)
        scale.others = float(word[1])
        return int(word[0])

    def _synchronized_layers(self) -> list[SyncBatchNorm]:
        return [layer for layer in self.module.modules() if isinstance(layer, SyncBatchNorm)]

    def _broadcast_all(self, src: int) -> None:
        bcast_list_((tensor for _, tensor in self._named_tensors()), src, self._group)

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.module.named_parameters(), *self.module.named_buffers()]

    def __getstate__(self) -> Any:
        raise InvalidArgument(
            "a DataParallel has connections to other ranks, so it can be neither copied nor saved: "
            "use its `.module`, for example copy.deepcopy(model.module)"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state, which loads with and without DataParallel."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads the module's state."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)
