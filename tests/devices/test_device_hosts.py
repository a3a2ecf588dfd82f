"""Arrays on devices of several hosts, where NCCL connects the ranks of each host and TCP the hosts:
emulated devices and a fake NCCL, and GPUs.

The hosts are simulated: ranks of this machine, threads or processes with a device each
(tests/support/group_devices.py), use different host names.
"""

import logging
import os
import signal
from typing import Any

import numpy as np
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import (
    LackOfNccl,
    machine_fixture,  # noqa: F401 - fixture
    numbers,
    odd,
    on,
    summed_once,
)
from test_device_channels import rings
from test_device_groups import every_verb, log_and_stats, same_bits
from test_device_messages import from_any_source, long_messages, round_trip

import pycomm
from pycomm import errors
from pycomm._core_api import device_groups
from pycomm.testing import run_ranks

pytestmark = pytest.mark.timeout(300)

HOSTS = pytest.mark.parametrize("hosts", [["a", "b"], ["a", "a", "b"], list("abab")], ids="".join)


def between_hosts(group: pycomm.Group, device: Any, body: Any, *args: Any) -> Any:
    if group.rank == 0:  # rank 0's option decides
        group.cuda_internode_transport = "tcp"
    return body(group, device, *args)


def on_hosts(machine: Any, hosts: list[str], body: Any, *args: Any, **options: Any) -> list[Any]:
    given = {"transport": "", "host_names": hosts, **options}
    return machine.run(len(hosts), between_hosts, body, *args, **given)


@HOSTS
@on("emulated", "cuda")
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_every_verb_crosses_hosts(machine, hosts, async_op):
    on_hosts(machine, hosts, every_verb, async_op)


@HOSTS
@on("emulated", "cuda")
def test_bits_are_those_of_the_host(machine, hosts):
    on_hosts(machine, hosts, same_bits)


def long_arrays(group: pycomm.Group, device: Any) -> None:
    """Messages that are copied in several pieces, the last of another size; the host's bits."""
    for count, dtype in ((5 << 20) + 3, "uint8"), ((5 << 17) + 3, "float64"):
        x = odd(group.rank, count, dtype)
        for algorithm in ("ring", "direct"):
            there = pycomm.all_reduce(device.put(x), algorithm=algorithm)
            here = pycomm.all_reduce(x.copy(), algorithm=algorithm)
            assert device.get(there).tobytes() == here.tobytes(), (dtype, algorithm)
        got = pycomm.all_gather(device.put(x), device.empty((group.size, count), dtype))
        wanted = np.stack([odd(rank, count, dtype) for rank in range(group.size)])
        assert device.get(got).tobytes() == wanted.tobytes(), dtype


@HOSTS
@on("emulated", "cuda")
def test_long_arrays_cross_hosts(machine, hosts):
    on_hosts(machine, hosts, long_arrays)


@HOSTS
@on("emulated", "cuda")
def test_long_messages_cross_hosts(machine, hosts):
    on_hosts(machine, hosts, long_messages)


@on("emulated")
def test_log_says_what_connects_the_hosts(machine, caplog):
    caplog.set_level(logging.INFO, "pycomm")
    assert on_hosts(machine, ["a", "a", "b"], log_and_stats) == ["auto"] * 3
    lines = [text for text in caplog.messages if "sends arrays of device" in text]
    how = "with NCCL inside hosts, with TCP between hosts"
    assert [line.endswith(how) for line in lines] == [True] * 3


def unencrypted_is_rejected(group: pycomm.Group, device: Any) -> None:
    with pytest.raises(errors.Unsupported, match="NCCL between hosts does not encrypt"):
        pycomm.all_reduce(device.put(numbers(group.rank, 10)), group=group)


@on("emulated", "cuda")
def test_encrypted(machine):
    on_hosts(machine, ["a", "a", "b"], every_verb, False, encrypt=True)
    machine.run(2, unencrypted_is_rejected, transport="", host_names=["a", "b"], encrypt=True)


@on("emulated", "cuda")
def test_between_processes(machine):
    on_hosts(machine, ["a", "a", "b"], every_verb, False, processes=True)


@HOSTS
@on("emulated", "cuda")
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_messages_cross_hosts(machine, hosts, async_op):
    on_hosts(machine, hosts, round_trip, async_op)


@on("emulated", "cuda")
def test_message_from_any_source(machine):
    on_hosts(machine, ["a", "a", "b"], from_any_source)


@on("emulated", "cuda")
def test_channels_and_graphs(machine):
    on_hosts(machine, ["a", "b", "b"], rings, False)


def sent_by(group: pycomm.Group, device: Any) -> Any:
    x = device.put(numbers(group.rank, 4096))
    for _ in range(2):
        device.counts()
        pycomm.all_reduce(x, algorithm="ring")
        device.get(x)
    stats = group._devices[device.index].stats()
    return device.counts(), stats.bytes_sent, stats.frames_sent, stats.algorithm


@on("emulated")  # the real NCCL does not count
def test_only_inter_host_data_uses_tcp(machine):
    for rank, (counts, sent, groups, algorithm) in enumerate(
        on_hosts(machine, list("aabb"), sent_by)
    ):
        # In a ring of ranks 0 1 | 2 3 those with an even number send to their own host, and the
        # others receive from it.
        even = rank % 2 == 0
        assert (counts["sends"], counts["receives"]) == ((6, 0) if even else (0, 6))
        assert counts["bytes_sent"] == (6 * 4096 if even else 0)
        assert (counts["groups"], counts["collectives"]) == (6, 0)
        assert (sent, groups, algorithm) == (2 * 6 * 4096, 2 * 2 * 6, "auto")


def asked_for_nccl(group: pycomm.Group, device: Any) -> None:
    x = device.put(numbers(group.rank))
    with pytest.raises(errors.Unsupported, match="NCCL connects only the ranks of each host"):
        pycomm.all_reduce(x, algorithm="nccl")
    pycomm.all_reduce(x)
    np.testing.assert_array_equal(device.get(x), sum(numbers(r) for r in range(group.size)))


@on("emulated", "cuda")
def test_native_nccl_algorithm_is_rejected_between_hosts(machine):
    on_hosts(machine, ["a", "a", "b"], asked_for_nccl)


def without_nccl(group: pycomm.Group, device: Any) -> np.ndarray:
    x = device.put(numbers(group.rank))
    pycomm.all_reduce(x)
    return device.get(x)


@on("emulated", "cuda")
def test_single_rank_of_a_host_needs_no_nccl(machine, monkeypatch):
    lack = LackOfNccl(monkeypatch, range(3))
    for got in on_hosts(machine, ["a", "b"], lack.run, without_nccl):
        np.testing.assert_array_equal(got, numbers(0) + numbers(1))
    with pytest.raises(errors.Unsupported, match="no NCCL anywhere"):
        on_hosts(machine, ["a", "a", "b"], lack.run, without_nccl)


def refused(group: pycomm.Group, device: Any) -> str:
    with pytest.raises(errors.Unsupported) as caught:
        pycomm.all_reduce(device.put(numbers(group.rank)))
    assert pycomm.all_reduce(np.ones(3)).tolist() == [group.size] * 3  # the group still works
    return str(caught.value)


@on("emulated, shared")
def test_where_nccl_fails_on_one_host_all_ranks_raise(machine, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # which the fake ignores
    *failed, two, three = on_hosts(machine, ["a", "a", "b", "c"], refused)
    assert all("ncclInvalidUsage" in text or "device" in text for text in failed), failed
    for text in (two, three):
        assert "rank 0 could not connect to the other ranks of its host with NCCL" in text


def killed(group: pycomm.Group, device: Any, who: int) -> str:
    x = summed_once(group, device)
    if group.rank == who:
        device.delay()  # the others wait on their devices
        pycomm.all_reduce(x)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((errors.PeerLost, errors.GroupBroken)) as caught:
        for _ in range(1000):
            pycomm.all_reduce(x)
            device.get(x)
    return str(caught.value)


@on("emulated")  # a GPU's delay ends by itself
@pytest.mark.parametrize("who", [1, 2], ids=["shared host", "own host"])
def test_a_rank_failure_is_reported_on_every_host(machine, who):
    options = {"processes": True, "return_exceptions": True}
    messages = on_hosts(machine, ["a", "a", "b"], killed, who, **options)
    assert isinstance(messages.pop(who), errors.PeerLost)
    assert all(f"rank {who}" in text or "gone" in text for text in messages), messages


def aborts_long_array(group: pycomm.Group, device: Any) -> tuple[bool, str]:
    """Whether the output is complete after an abort between two of its pieces, and the error."""
    count = 8 << 20  # several seconds on the slow link
    x, out = device.put(odd(group.rank, count, "uint8")), device.empty((2, count), "uint8")
    pycomm.all_gather(x, out)
    pycomm.barrier()  # both have enqueued the call
    if group.rank == 1:
        group.abort("enough")
    got = device.get(out)
    with pytest.raises(errors.GroupBroken) as caught:
        while True:
            pycomm.barrier()
    return np.array_equal(got[1 - group.rank], odd(1 - group.rank, count, "uint8")), str(
        caught.value
    )


@on("emulated", "cuda")
def test_abort_ends_the_transfer_of_a_long_array(machine):
    for complete, text in on_hosts(machine, ["a", "b"], aborts_long_array, link_bytes_per_s=2e6):
        assert not complete
        assert any(word in text for word in ("enough", "closed its connection")), text


def inherits(group: pycomm.Group, device: Any) -> None:
    group.cuda_channels = 2
    part = group.split(0)
    assert part is not None
    assert (part.cuda_channels, part.cuda_internode_transport) == (
        2,
        group.cuda_internode_transport,
    )
    x = device.put(odd(group.rank, 50, "float32"))
    with pytest.raises(errors.InvalidArgument, match="one of nccl, tcp"):
        device_groups.Options(1, "udp", "before").check()
    pycomm.all_reduce(x, group=part)
    assert part._devices[device.index].stats().algorithm == "auto"  # as rank 0 sets it
    group.cuda_internode_transport = "tpc"
    with pytest.raises(errors.InvalidArgument, match="cuda_internode_transport: got 'tpc'"):
        pycomm.all_reduce(x)


@on("emulated", "cuda")
def test_subgroups_use_the_same_transport(machine):
    on_hosts(machine, ["a", "b"], inherits)


def where(group: pycomm.Group) -> Any:
    pycomm.all_reduce(np.ones(10_000, "float32"))
    known = group.core
    return [m.transport for m in group.peer_info()], known.local_rank, known.host_count


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_simulated_hosts_act_as_hosts(processes):
    near = "shm" if processes else "local"
    found = run_ranks(3, where, transport="", host_names=["a", "b", "a"], processes=processes)
    assert found == [
        (["self", "tcp", near], 0, 2),
        (["tcp", "self", "tcp"], 0, 2),
        ([near, "tcp", "self"], 1, 2),
    ]


def test_invalid_simulated_hosts():
    with pytest.raises(errors.InvalidArgument, match="one for each of 2 ranks"):
        run_ranks(2, where, transport="", host_names=["a"])
    with pytest.raises(errors.InvalidArgument, match="does not reach other hosts"):
        run_ranks(2, where, host_names=["a", "b"])
    with pytest.raises(errors.InvalidArgument, match="up to 12 letters and digits"):
        run_ranks(2, where, transport="", host_names=["a/b", "a/b"])
