"""The processes of `python -m benchmarks elastic`: ranks of an elastic group, and one that waits to
take the place of a rank that is killed."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # by the first optimizer otherwise, where it takes a second
from torch import nn

import pycomm
from benchmarks.support.ports import free_port
from pycomm import Group, elastic
from pycomm.errors import GroupBroken, PeerLost

LIMIT_S = 120.0  # of a call, and of the wait for an answer
MARK = 50  # steps between two checksums
BATCH, WIDTH = 64, 256
LOADED = ["benchmarks.reliability.elastic_ranks"]  # by the server that forks processes

Answer = tuple[str, Any]
Say = Callable[[str, Any], None]
Run = Callable[..., None]
Body = Callable[[], Run]


class Ranks:
    """Ranks as processes that run body()(group, say, *args), and one more that waits. The context
    begins when they have started, and kills them at its end. A process calls body() before it
    joins, as a training builds its model: the survivors of a kill wait only from then.

    Args:
        file: for the addresses of the ranks.
        start: "spawn" imports the libraries in each process; "forkserver" once for all.
        ready: whether the process that takes the next place starts before the kill.
    """

    def __init__(self, file: str, size: int, start: str, ready: bool, body: Body) -> None:
        self._context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            self._context.set_forkserver_preload(LOADED)
        self._file, self._ready, self._body = file, ready, body
        self._secret = secrets.token_hex(32)
        self._next: Child | None = None
        self.waited_s = 0.0  # for processes to start, after kills
        given = {"size": size, "master": f"127.0.0.1:{free_port()}", "elastic": file}
        self._ranks = [self._start({**given, "rank": rank}) for rank in range(size)]

    def __enter__(self) -> Ranks:
        for rank in self._ranks:
            rank.receive("up")
        self.prepare()
        return self

    def __exit__(self, *_: object) -> None:
        for rank in [*self._ranks, *([self._next] if self._next else [])]:
            rank.end()

    def form(self, *args: Any) -> None:
        """Lets the ranks form the group and run the body."""
        for rank in self._ranks:
            rank.pipe.send(args)

    def replace(self, victim: int, *args: Any) -> float:
        """Kills a rank and lets a process take its place. Returns when the rank was killed, in
        seconds of time.monotonic()."""
        killed, killed_s = self._ranks[victim], self._ranks[victim].kill()
        if self._next is None:
            self._prepare()
            self.waited_s += time.monotonic() - killed_s
        assert self._next is not None
        self._ranks[victim], self._next = self._next, None
        self._ranks[victim].pipe.send((victim, *args))
        killed.end()
        return killed_s

    def prepare(self) -> None:
        """Starts the process for the next place, unless it starts after the kill."""
        if self._ready:
            self._prepare()

    def answers(self, kind: str) -> dict[int, Any]:
        """The next answer of that kind of each rank; others are dropped."""
        return {number: rank.receive(kind) for number, rank in enumerate(self._ranks)}

    def joined(self, rank: int) -> tuple[float, float]:
        """When the rank called init() or join(), and when it had the group."""
        begin_s, end_s = self._ranks[rank].receive("joined")
        return begin_s, end_s

    def poll(self, until_s: float) -> Iterator[tuple[int, str, Any]]:
        """Answers of all ranks as they come, until a moment of time.monotonic() or until all have
        ended."""
        pipes = {rank.pipe: number for number, rank in enumerate(self._ranks)}
        while pipes and (left_s := until_s - time.monotonic()) > 0:
            for pipe in wait(list(pipes), left_s):
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except EOFError:  # it has ended
                    del pipes[pipe]
                    continue
                yield (pipes[pipe], *checked(answer))

    def _prepare(self) -> None:
        self._next = self._start({"file": self._file})
        self._next.receive("up")

    def _start(self, given: dict[str, Any]) -> Child:
        given = {"secret": self._secret, "timeout_s": LIMIT_S, **given}
        return Child(self._context, _main, given, self._body)


class Child:
    """A process that runs main(pipe, *args) and sends answers: a kind and a value, or an error."""

    def __init__(self, context: Any, main: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_enter, args=(main, theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, kind: str, limit_s: float = LIMIT_S) -> Any:
        """Its next answer of that kind; others are dropped."""
        end = time.monotonic() + limit_s
        while self.pipe.poll(max(0.0, end - time.monotonic())):
            found, value = checked(self.pipe.recv())
            if found == kind:
                return value
        raise RuntimeError(f"a rank did not answer {kind} within {limit_s} s")

    def kill(self) -> float:
        """Kills it; returns when, in seconds of time.monotonic()."""
        os.kill(self.process.pid, signal.SIGKILL)
        return time.monotonic()

    def end(self) -> None:
        """Kills it, if it still runs, and waits."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def checked(answer: Answer) -> Answer:
    """The answer. Raises RuntimeError if it is an error."""
    if answer[0] == "error":
        raise RuntimeError(answer[1])
    return answer


def _enter(main: Callable[..., None], pipe: Connection, *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        main(pipe, *args)
    except BaseException:  # reported by the parent process
        pipe.send(("error", traceback.format_exc()))


def _main(pipe: Connection, given: dict[str, Any], body: Body) -> None:
    def say(kind: str, value: Any = None) -> None:
        pipe.send((kind, value))

    run = body()
    say("up")
    args = pipe.recv()
    begin_s = time.monotonic()
    if "file" in given:
        rank, *args = args
        group = pycomm.join(**given, rank=rank)
    else:
        group = pycomm.init(**given)
    say("joined", (begin_s, time.monotonic()))
    run(group, say, *args)


class Steps:
    """Ranks that have a state make calls; the first one after each failure is reported."""

    def __init__(self, state_bytes: int) -> None:
        self._state: dict[str, Any] = {"state": torch.ones(state_bytes // 4)}

    def __call__(self, group: Group, say: Say) -> None:
        state, x, step, new = self._state, torch.ones(1 << 18), 0, group.joined
        report = True
        while True:
            try:
                if new:
                    state, step = elastic.sync_state(state, step, group=group)
                    new = []
                pycomm.all_reduce(x, "max", group=group)
                step += 1
                if report:
                    say("step", time.monotonic())
                    report = False
            except (PeerLost, GroupBroken):  # a rank was killed
                group = group.replace()
                new, report = group.joined, True


class Training:
    """Trains until a moment of time.monotonic(), at least MARK steps. Reports each MARK-th step,
    the first one after a failure, and the end."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(
            *(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            nn.Linear(WIDTH, 8),
        )
        self._target = nn.Linear(64, 8)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def __call__(self, group: Group, say: Say, end_s: float) -> None:
        model, optimizer, parameters = self._model, self._optimizer, list(self._model.parameters())
        step, new, failed, ended, losses = 0, group.joined, False, False, []
        while True:
            try:
                if new:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    state, step = elastic.sync_state(state, step, group=group)
                    model.load_state_dict(state["model"])
                    optimizer.load_state_dict(state["optimizer"])
                    new = []
                if ended:
                    break
                # One part of the data for each step and rank, whichever process has the rank.
                data = torch.Generator().manual_seed(step * group.size + group.rank)
                x = torch.randn(BATCH, 64, generator=data)
                loss = nn.functional.mse_loss(model(x), self._target(x).detach())
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                over = torch.tensor([float(step >= MARK and time.monotonic() > end_s), loss.item()])
                sums = torch.cat([over, *(_gradient(p).flatten() for p in parameters)])
                pycomm.all_reduce(sums, "avg", group=group)
                ended = bool(sums[0] > 0)
                losses.append(float(sums[1]))
                at = 2
                for p in parameters:
                    _gradient(p).copy_(sums[at : at + p.numel()].view_as(p))
                    at += p.numel()
                optimizer.step()
                step += 1
                if failed:
                    say("step", time.monotonic())
                    failed = False
                if step % MARK == 0:
                    say("mark", (step, checksum(parameters), sum(losses) / len(losses)))
                    losses = []
            except (PeerLost, GroupBroken):  # a rank was killed
                group = group.replace()
                new, failed = group.joined, True
        say("end", step)
        pycomm.shutdown()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def checksum(parameters: list[nn.Parameter]) -> int:
    """CRC-32 of the bytes of all parameters."""
    return zlib.crc32(nn.utils.parameters_to_vector(parameters).detach().numpy().tobytes())
