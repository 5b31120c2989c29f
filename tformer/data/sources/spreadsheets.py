"""Rows of Excel and OpenDocument spreadsheets: the cells of the first visible sheet that has any, as text."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tformer.data.sources.files import Content, require_packages
from tformer.support.errors import InputError

if TYPE_CHECKING:
    from python_calamine import CalamineSheet

MAX_BYTES = 1 << 30  # of an unpacked file: a sheet is held in memory


def sheet_rows(content: Content) -> Iterator[tuple[int, list[str]]]:
    """(number of the row from 1, cells) of every row; a row without values has no cells."""
    sheet, _ = open_sheet(content)
    for number, row in enumerate(sheet.iter_rows(), 1):
        cells = [_as_text(value) for value in row]
        yield number, cells if any(cells) else []


def open_sheet(content: Content) -> tuple[CalamineSheet, int]:
    """(the sheet that is read, number of visible sheets with rows).

    Raises InputError for a file that is damaged, encrypted, too large, or without rows.
    """
    require_packages(content.file)
    from python_calamine import CalamineError, PasswordError, SheetVisibleEnum, load_workbook

    packed = io.BytesIO(b"".join(content.origin.read()))
    try:
        with zipfile.ZipFile(packed) as archive:
            size = sum(part.file_size for part in archive.infolist())
        if size > MAX_BYTES:
            raise InputError(
                f"{content.name}: {size:,} bytes when unpacked, expected at most {MAX_BYTES:,}",
                hint="save the sheet as .csv, which is read row by row",
            )
        packed.seek(0)
        book = load_workbook(packed)
        names = [each.name for each in book.sheets_metadata if each.visible == SheetVisibleEnum.Visible]
        sheets = [sheet for sheet in map(book.get_sheet_by_name, names) if sheet.start is not None]
    except PasswordError:
        raise InputError(f"{content.name}: is encrypted", hint="save it without a password") from None
    except (CalamineError, zipfile.BadZipFile) as error:
        raise InputError(f"{content.name}: damaged or no spreadsheet: {error}") from None
    if not sheets:
        raise InputError(f"{content.name}: no rows")
    return sheets[0], len(sheets)


def _as_text(value: Any) -> str:
    """A cell as text. Spreadsheets have floats only: whole ones are whole numbers."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
