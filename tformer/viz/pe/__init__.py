"""Positional encodings as pictures, pages and numbers: `tformer viz-pe`.

settings     options of the command: kind, sizes, layouts; what a view is
fixed        plots of fixed kinds, computed by the modules of training
learned      plots of learned tables and biases
views        the views of each kind, and several kinds compared
selection    from a run and the name of a view to plots
page         the HTML page, with values to check its script against
"""
