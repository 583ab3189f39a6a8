"""What hopflow costs, beside JAX: `make bench`, or `python -m benchmarks`.

workload.py    what a row is
workloads/     the rows: each program written twice, as alike as the libraries allow
measure.py     first calls and runs, in turns; the results must agree before
report.py      the tables, the machine's description, the JSON
layers.py      a command of its own: what many layers cost that are one subgraph
flat.py        a command of its own: what the elements cost that a step does not touch

Last in the first table is how many times as long a run takes where sizes are symbols.
The second is of many calls: fifty sizes with what is compiled for them, warm calls.
"""
