"""Small checkpoints that released versions have written, one folder a release."""
