"""The changes between two versions, applied to the tensors of an engine."""

from __future__ import annotations

import pytest
import torch
from support.states import same

from asyncckpt.errors import MismatchError
from asyncckpt.weights import WeightPublisher, WeightSubscriber, apply

KINDS: tuple[torch.dtype, ...] = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
)
KINDS += (torch.bool, torch.complex64, torch.complex128)


def states() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return two states. For each dtype 1% of the elements differ, all, or none."""
    torch.manual_seed(0)
    old, new = {}, {}
    for dtype in KINDS:
        bits = torch.randint(0, 2, (501, 7 * dtype.itemsize), dtype=torch.uint8)
        for name, share in (("some", 0.01), ("all", 1.0), ("none", 0.0)):
            flips = (torch.rand(501, 7) < share).repeat_interleave(dtype.itemsize, 1).to(torch.uint8)
            old[f"{name} {dtype}"], new[f"{name} {dtype}"] = bits.view(dtype), (bits ^ flips).view(dtype)
    return old | {"scalar": torch.tensor(1.0)}, new | {"scalar": torch.tensor(2.0)}


def clones(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def test_changes_make_the_new_version_of_the_old_one(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    old, new = states()
    publisher.publish(old, 1)
    publisher.publish(new, 2)
    with subscriber.acquire(2) as weights:
        weights["some torch.float32"].zero_()  # the reader's own change does not count
        changes = list(weights.patch(1) or ())
        found = {change.name: change for change in changes}
        assert not any(name.startswith("none") for name in found if "complex128" not in name)
        indices = found["some torch.bfloat16"].indices
        assert indices is not None and 0 < len(indices) < 100
        assert found["all torch.bfloat16"].indices is None
        held = clones(old)
        apply(held, changes)
        assert same(held, new)
        del changes, found, indices


def test_a_module_is_changed_in_place(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    torch.manual_seed(0)
    trained, engine = (torch.nn.Linear(40, 40, dtype=torch.bfloat16) for _ in range(2))
    engine.load_state_dict(trained.state_dict())
    publisher.publish(trained.state_dict(), 1)
    with torch.no_grad():
        trained.weight[3, 5:9] += 1
    publisher.publish(trained.state_dict(), 2)
    before = engine.weight.data_ptr()
    with subscriber.acquire(2) as weights:
        patch = weights.patch(1)
        assert patch is not None
        apply(engine, patch)
    assert torch.equal(engine.weight, trained.weight) and engine.weight.data_ptr() == before
    assert engine.weight.requires_grad


def test_without_the_older_version_the_whole_is_to_be_taken(
    publisher: WeightPublisher, subscriber: WeightSubscriber
) -> None:
    for version in range(1, 6):
        publisher.publish({"w": torch.full((100,), float(version))}, version)
    with subscriber.acquire() as weights:
        assert weights.patch(1) is None
        assert weights.patch(4) is not None
        assert weights.patch(4, epoch=weights.epoch - 1) is None  # the engine has a version of an earlier trainer
    assert weights.patch(4) is None
    publisher.publish({"w": torch.zeros(99)}, 6)
    with subscriber.acquire(6) as weights:
        assert weights.patch(5) is None


def test_both_versions_stay_while_the_changes_are_read(
    publisher: WeightPublisher, subscriber: WeightSubscriber
) -> None:
    old = {name: torch.zeros(1000) for name in "ab"}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][7] = new["b"][9] = 1.0
    publisher.publish(old, 1)
    publisher.publish(new, 2)
    with subscriber.acquire(2) as weights:
        patch = weights.patch(1)
        assert patch is not None
        changes = [next(patch)]
        for version in range(3, 8):
            publisher.publish({name: torch.full((1000,), float(version)) for name in "ab"}, version)
        changes += patch
    held = clones(old)
    apply(held, changes)
    assert same(held, new)
    assert not publisher.publish(old, 9).skipped


@pytest.mark.parametrize(
    "tensors",
    [{}, {"w": torch.zeros(50)}, {"w": torch.zeros(100, dtype=torch.float64)}, {"w": torch.zeros(200)[::2]}],
    ids=["missing", "another shape", "another dtype", "not contiguous"],
)
def test_tensors_that_do_not_fit(
    publisher: WeightPublisher, subscriber: WeightSubscriber, tensors: dict[str, torch.Tensor]
) -> None:
    publisher.publish({"w": torch.zeros(100)}, 1)
    publisher.publish({"w": torch.zeros(100).index_fill(0, torch.tensor([3]), 1.0)}, 2)
    with subscriber.acquire(2) as weights, pytest.raises(MismatchError, match="'w'.*load the whole version"):
        apply(tensors, weights.patch(1) or ())


def test_a_draft_model_belongs_to_its_version(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    """One publication has the model, its draft model and a quantized copy. Each is read by its prefix."""
    with (
        WeightSubscriber(publisher.address, prefix="draft.") as of_draft,
        WeightSubscriber(publisher.address, prefix="fp8.") as of_copy,
    ):
        for version in range(1, 8):
            model = {"weight": torch.full((100,), float(version))}
            copy = {"weight": model["weight"].to(torch.float8_e4m3fn), "scale": torch.tensor(1.0)}
            publisher.publish({"model": model, "draft": {"head": model["weight"][:10] * 2}, "fp8": copy}, version)
            with of_draft.acquire(version) as draft, of_copy.acquire(version=draft.version) as quantized:
                assert set(draft) == {"head"} and set(quantized) == {"weight", "scale"}
                assert torch.equal(draft["head"], torch.full((10,), 2.0 * version))
                assert torch.equal(quantized["weight"].float(), model["weight"].to(torch.float8_e4m3fn).float())
                with subscriber.acquire(version=draft.version) as whole:
                    assert torch.equal(whole["model.weight"], model["weight"])
                if version > 1:
                    patch = draft.patch(version - 1)
                    assert patch is not None and [change.name for change in patch] == ["head"]
