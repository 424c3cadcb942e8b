"""Writes the answers of `generate --batch`, a line of JSON each, in order; resumes a file that was interrupted."""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from mlx_llama3.errors import UserError
from mlx_llama3.system.locks import try_lock


class AnswerFile:
    """A file that answers are appended to, or standard output for `-`.

    requests: a fingerprint for each answer to come, in order, which stands in its line under "request".
    `done` answers are there already, from an earlier run; a last line that was half written is cut off.
    Raises `UserError` if the file holds something else, or cannot be written.
    """

    def __init__(self, path: Path, requests: Sequence[str]) -> None:
        self.path, self.done = path, 0
        self._requests = requests
        self._file: BinaryIO = sys.stdout.buffer
        if str(path) == "-":
            return
        try:
            mode = "x+b" if not path.exists() else "r+b" if path.is_file() else "wb"
            self._file = path.open(mode)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            if mode != "wb":  # a device or a pipe has no earlier answers to resume
                self._lock()
                self._resume()
        except UserError:
            self._file.close()
            raise

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not sys.stdout.buffer:
            self._file.close()

    def write(self, answer: dict[str, Any]) -> None:
        """Append the next answer as one line and flush it. Raises `UserError` if the disk is full."""
        content = {"request": self._requests[self.done], **answer}
        line = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            if self._file is sys.stdout.buffer:
                raise
            with suppress(OSError):  # closing tries to flush the same bytes again
                self._file.close()
            raise UserError(f"{self.path}: cannot be written: {error.strerror}; run again to go on") from error
        self.done += 1

    def _lock(self) -> None:
        """Lock the file until it is closed, because two runs at a time would overwrite each other's answers."""
        with suppress(OSError):  # a file system without locks
            if not try_lock(self._file):
                raise UserError(f"{self.path}: another run writes it now; wait for it, or choose another --out")

    def _resume(self) -> None:
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                self._check_half(line)
                break
            self._check(line)
            self.done, end = self.done + 1, end + len(line)
        self._file.seek(end)
        self._file.truncate()

    def _check(self, line: bytes) -> None:
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if not isinstance(content, dict) or "request" not in content:
            raise UserError(f"{self.path} is not a file of answers; choose another --out")
        if self.done == len(self._requests) or content["request"] != self._requests[self.done]:
            raise UserError(
                f"{self.path}, line {self.done + 1} answers another prompt, or with another model or other options; "
                "choose another --out"
            )

    def _check_half(self, line: bytes) -> None:
        """Raise `UserError` unless a half-written line is the start of an answer, which may be cut off."""
        expected = b'{"request": "' + (self._requests[self.done].encode() if self.done < len(self._requests) else b"")
        length = min(len(line), len(expected))
        if line[:length] != expected[:length]:
            raise UserError(f"{self.path} is not a file of answers to these prompts; choose another --out")
