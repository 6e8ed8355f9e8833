"""Settings of OpenMP that slow MXNet down on a CPU, in FP32 as well. ``bench environment`` measures what they cost."""

from __future__ import annotations

import os
from typing import Mapping

from ...tuning.machine import processors as available


def slowed_by(environment: Mapping[str, str] | None = None, processors: int | None = None) -> tuple[str, ...]:
    """Return what to set instead of each setting that slows MXNet down; None stands for those of this process."""
    environment = os.environ if environment is None else environment
    processors = available() if processors is None else processors
    text = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    # Without the variable MXNet counts two processors as one core (src/engine/openmp.cc).
    threads = int(text) if text.isdigit() and int(text) else max(processors // 2, 1)
    found = []
    if threads > processors:
        found.append(
            f"OMP_NUM_THREADS={threads}, and this process may use {processors} processors: threads wait for each "
            f"other. Set it to {processors}"
        )
    elif threads < processors:
        setting = f"OMP_NUM_THREADS={text}" if text else "OMP_NUM_THREADS is not set"
        found.append(
            f"{setting}: operators use {threads} of {processors} processors. Try {processors}, or leave the others to "
            "DataLoader workers"
        )
    if 1 < threads <= processors < 2 * threads and environment.get("OMP_WAIT_POLICY", "").lower() != "active":
        found.append(
            "OMP_WAIT_POLICY is not 'active': after the first large mx.nd.array of NumPy data, OpenMP's threads sleep "
            "between operators, and small operators take longer. Set it to 'active' before Python starts, or let "
            "DataLoader workers make the arrays"
        )
    return tuple(found)
