"""Test which implementation is selected, and save with each nvrx release."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.peers import NVRX, python

pytestmark = pytest.mark.usefixtures("forkserver")

_GUARD = """
import inspect, logging, sys, torch
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from asyncckpt.integrations import nvrx
mode = {"True": True, "False": False, "None": None}[sys.argv[1]]
found = [nvrx.family(mode) for _ in range(2)][0]
print("native" if found.native else "ours", found.cpu_shm)
"""


@pytest.mark.parametrize("version", NVRX)
def test_the_guard_looks_at_signatures(version: str) -> None:
    has_the_mode = version != "nvrx-0.4.1"
    asked = python(_GUARD, version, arguments=("True",))
    assert ("native True" if has_the_mode else "ours True") in asked
    assert asked.count("asyncckpt does it in its place") == (0 if has_the_mode else 1)
    assert "in its place" not in python(_GUARD, version, arguments=("None",))
    assert "native False" in python(_GUARD, version, arguments=("False",))


def test_without_nvrx_ours_serves() -> None:
    assert python(_GUARD, arguments=("True",)).split() == ["ours", "True"]
    with pytest.raises(pytest.fail.Exception, match=r"pip install\s+'asyncckpt\[nvrx\]'"):
        python(_GUARD, arguments=("False",))


# A job of one process. Without settings, nvrx's own finalizing calls a device.
_SAVE = """
import logging, os, sys, torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from asyncckpt.integrations import nvrx

def main():
    folder = sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}.meeting", rank=0, world_size=1)
    torch.cuda.current_device = lambda: "cpu"
    found = nvrx.family(True)
    queue = found.queue(persistent=True)
    found.warm_up(0)
    state = {f"w{number}": torch.full((1000,), float(number)) for number in range(20)} | {"step": 3}
    for number in range(3):
        path = f"{folder}/{number}"
        os.makedirs(path)
        writer = found.writer(path, thread_count=2)
        planned = found.save_state_dict_async_plan(state, writer, None, 0)
        function, preload, arguments = writer.get_save_function_and_args()
        finalize = [lambda: found.save_state_dict_async_finalize(*planned)]
        queue.schedule_async_request(found.AsyncRequest(function, arguments, finalize, preload_fn=preload))
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        into = {f"w{number}": torch.zeros(1000) for number in range(20)} | {"step": 0}
        state_dict_loader.load(into, checkpoint_id=path)
        assert into.pop("step") == 3 and all(torch.equal(value, state[name]) for name, value in into.items())
    queue.close()
    dist.destroy_process_group()
    print("native" if found.native else "ours", "saved")

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("version", [*NVRX, ""])
def test_with_every_nvrx_a_save_is_one_that_stock_dcp_reads(version: str, tmp_path: Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(_SAVE)
    code = f"import runpy, sys; sys.argv = ['', sys.argv[1]]; runpy.run_path({str(script)!r}, run_name='__main__')"
    native = version in ("nvrx-0.6.0", "nvrx-0.7.0")
    said = python(code, *filter(None, [version]), arguments=(str(tmp_path / "it"),))
    assert f"{'native' if native else 'ours'} saved" in said
