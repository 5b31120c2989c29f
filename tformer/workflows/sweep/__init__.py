"""`tformer sweep`: one recipe varied along axes, every variant trained over seeds, one table of costs and metrics.

plan      what is asked for: tasks, axes, seeds, evaluations; read from a file
flags     the same of the command's flags
grid      the plan's cells: one training each
resolve   a cell's recipe, checked before anything is trained
process   one child process: its exit code, its peak memory, its end by a signal
cells     one cell: trained, resumed, evaluated
results   what it came to, read from its run and kept on file
table     results over seeds: mean and standard deviation
report    that table as Markdown, CSV and JSON
curves    the plot of the validation metric
run       all of it in order
"""
