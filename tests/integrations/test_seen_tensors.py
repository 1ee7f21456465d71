"""Detection of tensors that change between their capture and their copy."""

from __future__ import annotations

import pytest
import torch

from asyncckpt.integrations.capture import SeenTensors


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors_of_all_kinds_are_looked_at() -> None:
    numbers = torch.tensor([1.0, 2.0])
    kinds = [
        torch.quantize_per_tensor(numbers, 0.1, 0, torch.qint8),
        torch.empty(3, device="meta"),
        torch.complex(numbers, numbers).conj(),
        torch.complex(numbers, numbers).conj().imag,
        numbers.to_sparse(),
        torch.ones(2, dtype=torch.bool),
        torch.ones(()),
        torch.ones(0),
    ]
    seen = SeenTensors()
    for number, kind in enumerate(kinds):
        seen.add(str(number), {"of": kind})
    assert seen.changed() == []
    kinds[6].data.fill_(2)
    kinds[0].data.copy_(-numbers)
    assert set(seen.changed()) == {"0", "6"}
