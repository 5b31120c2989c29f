"""Positional encodings, seen: `tformer viz-pe`.

settings, catalogue      what to show and in which words
absolute, relative       fixed kinds, computed by the modules of training
tables, compare          what a run has learned; decay of several kinds side by side
views                    from names to plots
numbers                  plots as JSON and CSV (pictures: viz.figure, characters: viz.terminal)
page, reference          the explorer, and the values its script is checked against
"""
