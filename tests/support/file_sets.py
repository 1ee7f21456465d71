"""A stand-in for ``Engine.save_files``, until that is there: it writes on a thread, as workers of tests do."""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from asyncckpt.engine.engine import Engine
from asyncckpt.errors import CheckpointError, StorageError
from asyncckpt.file_set import DcpFolder, FileSet, SafetensorsFile, TorchFile
from asyncckpt.save_handle import Save, SaveState
from asyncckpt.worker import process as worker_process

_untold: list[tuple[SaveState, CheckpointError]] = []


def install(monkeypatch: Any) -> None:
    _untold.clear()
    monkeypatch.setattr(Engine, "save_files", save_files, raising=False)


def _bytes(content: Any) -> bytes:
    if isinstance(content, TorchFile):
        buffer = io.BytesIO()
        torch.save(content.obj, buffer, pickle_protocol=content.pickle_protocol)
        return buffer.getvalue()
    if isinstance(content, SafetensorsFile):
        return safetensors.torch.save(dict(content.tensors), content.metadata)
    return bytes(content)


def save_files(self: Engine, path: Any, files: FileSet, *, step: Any = None, existing: str = "refuse", retention: Any = None) -> Save:
    for state, error in [each for each in _untold if not each[0].is_reported]:
        state.is_reported = True
        if self.config.failure == "raise":
            raise error
    final = Path(path).absolute()
    if existing == "refuse":
        assert not final.exists() or not list(final.iterdir()), final
    partial = final.with_name(f".{final.name}.partial")
    partial.mkdir(exist_ok=True)
    if dist.is_initialized():
        dist.barrier()
    for name, content in files.contents.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, DcpFolder):
            dcp.save(dict(content.state_dict), storage_writer=dcp.FileSystemWriter(partial / name), planner=content.planner)
        else:
            assert not (partial / name).exists()
            (partial / name).write_bytes(_bytes(content))
    if dist.is_initialized():
        dist.barrier()
    state = SaveState(final, step)
    fault = [word for word in worker_process.command() if ":" in word and not word.startswith("/")]

    def commit() -> None:
        while fault == ["write:hold"] and not os.path.exists(os.environ["ASYNCCKPT_TEST_GATE"]):
            time.sleep(0.005)
        if fault and "enospc" in fault[0]:
            error = StorageError("no space", path=final, step=step)
            shutil.rmtree(partial)
            _untold.append((state, error))
            state.end(error)
            return
        if not dist.is_initialized() or dist.get_rank() == 0:
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
        state.end(None)

    if dist.is_initialized():
        commit()
        dist.barrier()
    else:
        threading.Thread(target=commit).start()
    return Save(state)
