"""The progress bar of tqdm. Import this module only to show a bar, because tqdm may be missing."""

from __future__ import annotations

import threading

from tqdm import tqdm


class Bar(tqdm):  # type: ignore[type-arg]  # nothing is iterated over
    """A bar that leaves no thread of its own in the training process, and no lock of multiprocessing."""

    monitor_interval = 0


Bar.set_lock(threading.RLock())
