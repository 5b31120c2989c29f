"""Tasks: everything about each kind of data. `table.py` lists them."""
