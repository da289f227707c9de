"""A worker with a thread for each core gives each thread one of its own, and nothing else."""

import os
import subprocess
import sys

import pytest
import torch

from workers.native.library import kernels

SCRIPT = """
import os, sys, threading
from workers.fake import FakeRunner
from workers.threads import OnOneThread

executor = OnOneThread(FakeRunner(), int(sys.argv[1]))
thread = threading.Thread(target=lambda: (executor.run(()), print(len(os.sched_getaffinity(0)))))
thread.start()
thread.join()
print(len(os.sched_getaffinity(0)))
"""


def cores_of(threads: int) -> list[int]:
    """How many cores the step loop's thread may use after its first step, and the main thread."""
    command = [sys.executable, "-c", SCRIPT, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system pins no threads")
def test_only_a_worker_with_the_whole_machine_takes_cores_for_itself():
    cores = len(os.sched_getaffinity(0))
    if kernels() is None or cores < 2:
        pytest.skip("needs native kernels and two cores")
    threads = torch.get_num_threads()
    assert cores_of(cores) == [1, cores]
    assert cores_of(1) == [cores, cores], "it shares the machine with others"
    assert torch.get_num_threads() == threads
