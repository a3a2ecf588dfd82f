"""vLLM's worker for the CPU, whose tensor-parallel calls use torch.distributed.

On one host vLLM would make them through shared memory of its own. programs.py selects this class.
"""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.worker.cpu_worker import CPUWorker

# As where the ranks cannot share memory.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _communicator: False


class Worker(CPUWorker):
    """The same worker, after the change above."""
