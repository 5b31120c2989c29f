"""Pictures and pages: positional encodings, attention, curves. matplotlib is imported here and nowhere else.

plots                 plots as values: heat maps, lines, colour maps; as JSON and CSV
figure                the matplotlib back end: plots, and panels of curves
terminal              plots as terminal text
picture               plots, and reports of numbers and plots (`ReportView`), as one output in any format
page, assets/         HTML pages: style, state in the URL, heat maps, lines, tables; no network; tensor shapes
                      (`inspect --shapes`)
output                output format and file
pe/                   positional encodings (`viz-pe`)
attention/            attention weights (`viz-attention`)
lens/                 answers after each layer, parts of logits (`lens`)
plot/                 curves: of trainings (`plot`), of sweeps and of bench reports
evaluation            plots of an evaluation (`evaluate --plot`)
heads                 scores of attention heads (`heads`)
patching              activation patching and ablation (`patch`)
attribution           which token or patch mattered (`attribute`)
embeddings            neighbours and principal components of vectors (`viz-embeddings`)

Importing the package imports neither torch nor matplotlib.
"""
