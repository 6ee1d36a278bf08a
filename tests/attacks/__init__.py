"""Hostile clients against a real syncer: none of them changes the model, ends the run, or stops it."""
