"""Counts of the calls of asyncckpt's Python functions, in this process or in a worker: ``call_counts.py FILE``.

Run as a script, this module is a worker. ``ask`` makes the worker write the counts since the last question to ``FILE``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# This file is run as a script.
sys.path.append(str(Path(__file__).parent.parent))

from support.workers import wait_for

HERE = Path(__file__).resolve().parent.parent.parent
FOLDERS = tuple(f"{HERE / name}/" for name in ("asyncckpt", "worker", "shm"))


class CallCounts:
    """Counts calls by the function's file, in all threads that start while this is installed."""

    def __init__(self) -> None:
        self.is_counting = False
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call. ``sys.setprofile`` calls this."""
        # Comprehensions have no frame of their own from Python 3.12 on.
        if self.is_counting and event == "call" and frame.f_code.co_name[0] != "<":
            file = os.path.realpath(frame.f_code.co_filename)
            if file.startswith(FOLDERS):
                self.calls[str(Path(file).relative_to(HERE))] += 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Count the calls of this thread, and of threads that start meanwhile, as long as ``is_counting``."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def ask(path: Path) -> Counter[str]:
    """Return the calls in the worker since the last question. ``path``: the worker's ``FILE``."""
    Path(f"{path}.ask").touch()
    wait_for(path.exists)
    found = Counter(json.loads(path.read_text()))
    path.unlink()
    return found


def _main(path: str) -> None:
    counts = CallCounts()
    counts.is_counting = True

    def answer() -> None:
        while True:
            time.sleep(0.005)
            if os.path.exists(f"{path}.ask"):
                os.unlink(f"{path}.ask")
                found, counts.calls = counts.calls, Counter()
                Path(f"{path}.new").write_text(json.dumps(found))
                os.replace(f"{path}.new", path)

    threading.Thread(target=answer, daemon=True).start()
    from asyncckpt.worker import __main__ as worker
    from asyncckpt.worker.staged_image import StagedImage

    wait_beyond = StagedImage.wait_beyond

    def wait_once(image: StagedImage, nbytes: int, whole: int) -> int:
        # The number of looks at a copy under way depends on the load of the machine.
        wait_for(lambda: image._is_complete or image._failure is not None)
        return wait_beyond(image, nbytes, whole)

    setattr(StagedImage, "wait_beyond", wait_once)  # noqa: B010 - mypy

    with counts.installed():
        sys.exit(worker.main(sys.argv[2:]))


if __name__ == "__main__":
    _main(sys.argv[1])
