"""FILES: what must outlive the process. Knows neither the core nor what the numbers mean."""
