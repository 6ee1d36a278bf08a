"""FILES: what must outlive the process. Knows neither the core nor what the numbers mean."""

from diloco_plugin.store.formats import (
    FORMAT,
    THETA,
    Contribution,
    MergeRecord,
    RunFile,
    digest_of,
)
from diloco_plugin.store.store import Store

__all__ = ["FORMAT", "THETA", "Contribution", "MergeRecord", "RunFile", "Store", "digest_of"]
