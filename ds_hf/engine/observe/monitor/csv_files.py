"""One CSV file for each name of events, in ``output_path/job_name``.

``Train/Samples/lr`` is ``Train_Samples_lr.csv``: a header ``step,lr``, then a row of samples and number for each event.
Rows are handed to the operating system at each call, so a killed process leaves all of them. A file that is there
already is continued without another header: a resumed run goes on in the files of the run before.
"""

from __future__ import annotations

import contextlib
import csv
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from ds_hf.engine.observe.monitor.base import Event, Writer, writable_folder
from ds_hf.errors import DsHfError

__all__ = ["CsvMonitor"]


class CsvMonitor(Writer):
    """The section ``csv_monitor``.

    Attributes:
        output_path, job_name: the section's.
        log_dir: the folder, absolute; ``None`` where nothing is written.
        filenames: of the files written to so far, without ``.csv``.
    """

    section = "csv_monitor"

    def __init__(self, csv_config: Any) -> None:
        self.output_path: str = csv_config.output_path
        self.job_name: str = csv_config.job_name
        self.log_dir: str | None = None
        self.filenames: list[str] = []
        self._files: dict[str, TextIO] = {}
        weakref.finalize(self, _close_all, self._files)
        super().__init__(csv_config)

    def _open(self) -> None:
        self.log_dir = str(writable_folder(self.section, self.output_path, self.job_name))

    def _write(self, events: Sequence[Event]) -> None:
        """Raises:
        DsHfError: a file cannot be written.
        """
        touched: dict[str, TextIO] = {}
        try:
            for name, value, samples in events:
                touched[name] = file = self._file(name)
                csv.writer(file).writerow([samples, value])
            for file in touched.values():
                file.flush()
        except OSError as error:
            self.close()
            raise DsHfError(
                f"csv_monitor cannot write into {self.log_dir}: {error.strerror or error}; make room there, name "
                "another output_path, or set csv_monitor.enabled to false"
            ) from error

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            stem = name.replace("/", "_").replace(" ", "_")
            path = Path(str(self.log_dir), f"{stem}.csv")
            file = path.open("a", newline="", encoding="utf-8")
            if file.tell() == 0:
                csv.writer(file).writerow(["step", name.rpartition("/")[2]])
            self._files[name] = file
            if stem not in self.filenames:
                self.filenames.append(stem)
        return self._files[name]

    def close(self) -> None:
        """Close the files."""
        _close_all(self._files)


def _close_all(files: dict[str, TextIO]) -> None:
    while files:
        with contextlib.suppress(OSError):  # rows are written out at each call, which has told of it
            files.popitem()[1].close()
