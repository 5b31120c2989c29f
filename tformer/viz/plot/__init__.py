"""Curves of runs: what metrics.jsonl holds, as a page, a picture, characters in a terminal, JSON or CSV.

records     read runs: columns of numbers by split and metric
series      which metrics, along which axis, how smooth: panels of series, the same for every format
ticks       round numbers for axes
page, figure, terminal, document      one format each
"""
