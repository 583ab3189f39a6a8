"""What hopflow costs, beside JAX: `make bench`, or `python -m benchmarks`.

workload.py    what a row is
workloads/     the rows: each program written twice, as alike as the libraries allow
measure.py     first calls and runs, in turns; the results must agree before
report.py      the table, the machine's description, the JSON
"""
