"""The first step of the data path: which files a source names, how they divide into parts, and their documents.
Everything streams: memory is bounded by the largest document, never by the size of a file or of the corpus. A part
depends on the files alone, so any number of workers reads the same parts."""

from bessemer.data.read.entry import BadRow, Document, FileEntry, FilePiece, SourcePart
from bessemer.data.read.files import list_files
from bessemer.data.read.parts import divide_source, read_documents, read_part
from bessemer.data.read.secrets import check_storage_options, redact

__all__ = [
    "BadRow",
    "Document",
    "FileEntry",
    "FilePiece",
    "SourcePart",
    "check_storage_options",
    "divide_source",
    "list_files",
    "read_documents",
    "read_part",
    "redact",
]
