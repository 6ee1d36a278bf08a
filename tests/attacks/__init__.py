"""Hostile clients against a real syncer: none changes the model, ends the run or stops it."""
