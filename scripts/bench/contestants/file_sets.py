"""Sets of files like those of Hugging Face's Trainer. A third of the tensors is the model, the rest the optimizer.

``FileSets`` saves the set by asyncckpt. ``Files`` saves each file by its own function, and syncs it.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from asyncckpt import FileSet
from bench.contestants.contestant import Contestant, Pending
from bench.contestants.ours import Ours
from bench.contestants.torch_save import write
from bench.states import State, tensors_of, with_tensors

_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.pt", "trainer_state.json"
_HEADER = {"format": "pt"}


def _split(state: State) -> tuple[dict[str, torch.Tensor], dict[str, Any], bytes]:
    """Return the contents of the three files."""
    names = {id(tensor): f"tensor.{number}" for number, tensor in enumerate(tensors_of(state))}
    last = len(names) // 3
    model = {names[id(tensor)]: tensor for number, tensor in enumerate(tensors_of(state)) if number < last}
    rest = with_tensors(state, lambda tensor: names[id(tensor)] if names[id(tensor)] in model else tensor)
    return model, rest, json.dumps({"log_history": [{"loss": 1.0, "step": step} for step in range(1000)]}).encode()


def _join(path: str) -> State:
    model, rest = load_file(os.path.join(path, _MODEL)), torch.load(os.path.join(path, _OPTIMIZER), mmap=True)
    return dict(_filled(rest, model))


def _filled(value: Any, model: dict[str, torch.Tensor]) -> Any:
    """Return ``value`` with the names of model tensors replaced by the tensors."""
    if isinstance(value, dict):
        return {key: _filled(each, model) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, model) for each in value]
    return model.get(value, value) if isinstance(value, str) else value


class FileSets(Ours):
    def prepare(self, state: State) -> None:
        self._checkpointer.prepare(self._files(state))

    def save(self, number: int, state: State) -> Pending:
        save = self._checkpointer.save(number, self._files(state))
        return Pending(wait=save.result)

    def load(self, number: int, state: State) -> State:
        return _join(self.path(number))

    def _files(self, state: State) -> FileSet:
        model, rest, text = _split(state)
        files = FileSet()
        files.add_safetensors(_MODEL, model, _HEADER)
        files.add_torch_file(_OPTIMIZER, rest)
        files.add_bytes(_STATE, text)
        return files


class Files(Contestant):
    blocks = True

    def save(self, number: int, state: State) -> Pending:
        model, rest, text = _split(state)
        os.makedirs(path := self.path(number))
        save_file(model, os.path.join(path, _MODEL), _HEADER)
        fd = os.open(os.path.join(path, _MODEL), os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        write(os.path.join(path, _OPTIMIZER), rest)
        with open(os.path.join(path, _STATE), "wb") as file:
            file.write(text)
        return Pending()

    def load(self, number: int, state: State) -> State:
        return _join(self.path(number))
