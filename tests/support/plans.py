"""Whether something was planned, or a plan was there."""

from __future__ import annotations

from unittest import mock

from asyncckpt.planning.draft import make_plans


def counting_plans() -> mock._patch[mock.MagicMock]:
    """In its context planning goes on as always, and is counted."""
    return mock.patch("asyncckpt.engine.plan_selection.make_plans", wraps=make_plans)
