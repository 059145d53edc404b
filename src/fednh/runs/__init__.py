"""Run folders: layout, checkpoints, client states, models."""
