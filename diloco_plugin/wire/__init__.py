"""BYTES: msgspec only. What may be said, how it becomes bytes, and how a fragment is cut up."""
