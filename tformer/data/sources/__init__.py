"""Sources: files, tables, images and built-in data, read as documents, rows or arrays."""
