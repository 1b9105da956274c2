"""PyTorch's threads wait for each other without holding on to their cores.

GNU OpenMP lets a thread that waits spin for milliseconds. Where another process has the core of the one it
waits for, that is how long every operation takes: beside one busy process the bounds of a small network took
20 times as long on two cores, an attack 80 times. To spin for some microseconds only costs at most a tenth on
an idle machine, which is about what times vary by.
"""

from __future__ import annotations

import os

SPINS = "5000"


def spin_briefly() -> None:
    """Let threads of this process and of those it starts spin for some microseconds only.

    To be called before PyTorch is imported, which reads it once. Nothing is changed where the user has said
    how to wait.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
