"""`tformer sweep`: one recipe varied along axes, every variant trained over seeds, one table of costs and metrics.

plan       tasks, axes, seeds and evaluations, from a file or from options
grid       the plan's cells, one training each, with their resolved recipes
cells      one cell: trained and evaluated in child processes, its result stored
table      mean and standard deviation over seeds as Markdown, CSV, JSON and plots
run        the whole sweep
"""
