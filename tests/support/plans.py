"""Count how often a save is planned anew."""

from __future__ import annotations

from unittest import mock

from asyncckpt.planning.draft import make_plans


def counting_plans() -> mock._patch[mock.MagicMock]:
    """Return a patch that counts the calls of ``make_plans``, and still calls it."""
    return mock.patch("asyncckpt.planning.plan.make_plans", wraps=make_plans)
