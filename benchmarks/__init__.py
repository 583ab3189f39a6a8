"""What hopflow costs beside its peers: `make bench` or `python -m benchmarks`.

workload.py    what a row is
workloads/     the rows: each program written twice, as alike as the libraries allow;
               and many a third time, in C, in the file beside that of the row
dr_jit.py      the rows of divergent loops in Dr.Jit, if it is installed
in_numba.py    the rows in Numba, if it is installed: loops over NumPy arrays
native.py      how the rows in C are compiled and called: with which flags
measure.py     first calls and runs, in turns; the results must agree before
report.py      the tables, the machine's description, the JSON
layers.py      a command of its own: what many layers cost that are one subgraph
flat.py        a command of its own: what the elements cost that a step does not touch

The columns of the first table, after those of JAX: how many times as long a run takes
where sizes are symbols; a run in C, and how many times as long hopflow and JAX take;
and, where JAX's program is by `vmap`, how many times as long it takes by `lax.map`.
Divergent loops run in Dr.Jit, too (`pip install drjit`), and many rows in Numba: lines
below have the means, and Numba's first calls.
The lines below it have the geometric means, and the rows that are worst for hopflow.
The second table is of many calls: fifty sizes with what is compiled for them, warm
calls.

A row in C is what a careful programmer writes for that task by hand: the algorithm, the
dtypes and the results of the row (within its tolerance), loops in the order of memory,
vectors and masks where they pay, threads of OpenMP where a loop is long enough to
share. It writes to memory that it was given, where the libraries return new arrays; it
checks no index, and its minima and maxima lose NaNs, which those of hopflow keep.
Without a C compiler, the reason is printed, and the columns are empty.
"""
