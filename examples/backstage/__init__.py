"""What makes `demo.py` run: processes, the table, the plot. Nothing here is needed by a learner."""
