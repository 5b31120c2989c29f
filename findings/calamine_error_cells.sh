#!/usr/bin/env bash
# python-calamine 0.9.1: a spreadsheet cell that holds an error (#N/A, #DIV/0!) is read as an empty text.
#
# A label or score that a formula failed to compute cannot be told from a cell that was left empty: to_python() gives ''
# for both, without an error or a warning.
#
# Seen:    [['text', 'label'], ['a', 1.0], ['b', ''], ['c', '']] of the cells 1, #N/A and an empty one
# A guess: the text '#N/A', or an exception, as other readers of spreadsheets give.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet python-calamine==0.9.1 openpyxl==3.1.5
"$folder/venv/bin/python" - "$folder/table.xlsx" <<'PYTHON'
import sys

import openpyxl
from python_calamine import load_workbook

book = openpyxl.Workbook()
for row in (["text", "label"], ["a", 1], ["b", "#N/A"], ["c", None]):
    book.active.append(row)
assert book.active["B3"].data_type == "e"  # stored as an error, not as a text
book.save(sys.argv[1])
found = load_workbook(sys.argv[1]).get_sheet_by_index(0).to_python()
print(found)
assert found == [["text", "label"], ["a", 1.0], ["b", ""], ["c", ""]]
PYTHON
