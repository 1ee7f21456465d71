"""Find frozen tensors: parameters without ``requires_grad``, and names in ``Config.assume_unchanged``.

Each rank puts its frozen tensors into a data file of their own. If no byte of the file has changed, the worker links
the file and does not write it (``worker/durable_files.py``). The names only determine the file of a tensor. If a frozen
tensor changes, its new values are saved, and its whole file is written again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from fnmatch import translate
from typing import Any

import torch

from asyncckpt.planning.structure import has_stateful, stateful_types


def matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a function to tell whether a name matches any of ``patterns`` (``fnmatch``)."""
    whole = re.compile("|".join(map(translate, patterns)) if patterns else r"(?!)")
    return lambda name: name in patterns or whole.match(name) is not None


def frozen_parameters(state_dict: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the frozen parameters of each module in ``state_dict``, at any depth, as DCP flattens them.

    A parameter is frozen if ``requires_grad`` is false. Some wrappers rename parameters in ``state_dict()`` alone.
    Their names here belong to no tensor and have no effect.

    Raises ``TypeError`` if ``state_dict`` is no mapping.
    """
    top, deep = stateful_types(state_dict)
    modules = {kind for kind in top | deep if issubclass(kind, torch.nn.Module)}
    return frozenset(_frozen_in(state_dict, "", modules)) if modules else frozenset()


def _frozen_in(container: Mapping[str, Any] | list[Any], prefix: str, modules: Set[type]) -> Iterator[str]:
    """Yield the names in a container. ``prefix``: the name of the container, followed by a dot."""
    for key, value in container.items() if isinstance(container, Mapping) else enumerate(container):
        if type(value) in modules:
            for name, parameter in value.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    yield f"{prefix}{key}.{name}"
        elif has_stateful(value, modules):
            yield from _frozen_in(value, f"{prefix}{key}.", modules)
