"""Test checkpoints of many parties on an object store."""

from __future__ import annotations

from support.object_stores import s3_root, s3_server
from test_party import check_saved_again, check_whole

__all__ = ["s3_root", "s3_server"]


def test_on_an_object_store(s3_root: str) -> None:
    check_whole(s3_root)


def test_a_part_that_is_saved_again_changes_nothing(s3_root: str) -> None:
    check_saved_again(s3_root)
