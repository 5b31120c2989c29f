"""Training curves: metrics.jsonl of runs as a page, a picture, terminal text, JSON or CSV (`tformer plot`).

series      runs as columns of numbers; panels of series, the same for every format
page        the HTML page, JSON and CSV (pictures: viz.figure; terminal: viz.terminal)
"""
