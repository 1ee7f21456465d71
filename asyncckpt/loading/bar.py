"""The bar of tqdm. Import it where a bar is shown: the package may be missing."""

from __future__ import annotations

import threading

from tqdm import tqdm


class Bar(tqdm):  # type: ignore[type-arg]  # nothing is iterated over
    """A bar that leaves neither a thread of its own in the training process nor a lock of multiprocessing."""

    monitor_interval = 0


Bar.set_lock(threading.RLock())
