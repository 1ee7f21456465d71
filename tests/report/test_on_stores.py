"""Test the command line on checkpoints in an object store."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.object_stores import s3_root, s3_server

from asyncckpt import Checkpointer
from asyncckpt.cli import main
from asyncckpt.extension import StorageSource, storage_for

__all__ = ["s3_root", "s3_server"]


def test_our_checkpoints(s3_root: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(s3_root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(1000), "b": torch.full((10,), float(step))}).result(60)
    assert main(["ls", s3_root]) == 0 and "durable after" in capsys.readouterr().out
    (first, second) = _facts(["ls", s3_root], capsys)
    assert first["bytes_on_disk"] == first["bytes"] and second["bytes_on_disk"] == second["bytes"]
    for values in ([], ["--values"]):
        (found,) = _facts(["diff", f"{s3_root}/step-00000001", s3_root, *values], capsys, status=1)
        assert [each["name"] for each in found["differences"]] == ["b"] and found["same"] == 1
    assert main(["timeline", s3_root]) == 0
    events = json.loads(capsys.readouterr().out)["traceEvents"]
    assert {"save 1", "save 2", "write", "commit"} <= {event["name"] for event in events}
    assert main(["advise", s3_root, "--mtbf", "1h"]) == 0 and "from 1 save;" in capsys.readouterr().out


def _facts(argv: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> list[dict[str, Any]]:
    assert main([*argv, "--json"]) == status
    facts: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return facts


def test_what_is_removed_while_it_is_checked_is_not_damaged(
    s3_root: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention may remove the checkpoint, because no reader can hold it on an object store."""
    with Checkpointer(s3_root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(1000)}).result(60)
    first, real = f"{s3_root}/step-00000001", StorageSource.open

    def removed(source: StorageSource, *args: Any) -> Any:
        if source.path == first and storage_for(first).exists(f"{first}/asyncckpt.json"):
            storage_for(first).remove_checkpoint(first)
        return real(source, *args)

    monkeypatch.setattr(StorageSource, "open", removed)
    (facts,) = _facts(["verify", s3_root], capsys)
    assert facts["path"].endswith("step-00000002") and facts["ok"]
