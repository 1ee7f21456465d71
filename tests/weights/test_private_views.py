"""Private views: the changes of one user are gone before the next user gets the view."""

from __future__ import annotations

import os

import pytest
from support.checkpoints import PAGE

from asyncckpt.shm.huge import take_huge
from asyncckpt.shm.segment import HUGE_PAGE, Segment
from asyncckpt.weights.lease import PrivateViews


@pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE + 7, HUGE_PAGE, 3 * HUGE_PAGE + PAGE + 7])
@pytest.mark.parametrize("pages", ["small", "huge"])
def test_what_was_written_is_gone(nbytes: int, pages: str) -> None:
    """The changes are gone for all sizes of mappings and pages."""
    with Segment.create("asyncckpt-test", nbytes) as segment:
        if pages == "huge":
            take_huge(segment, 0, nbytes)
        data = os.urandom(nbytes)
        segment.view[:] = data
        views = PrivateViews(segment)
        for at in (0, nbytes // 2, nbytes - 1):
            view = views.take()
            assert bytes(view) == data
            view[at] ^= 255
            assert bytes(view) != data and bytes(segment.view) == data
            views.give_back(view)
            assert views.take() is view and bytes(view) == data
            views.give_back(view)
        del view
        views.close()
