"""Mutation tests of staging: remove each wait, hold and check by itself, and see that a device test fails."""
