"""From files to token stores: the documents of every source are curated, split, tokenized and stored in a cache folder.

The folder's name is a fingerprint of everything that its content depends on; the folder gets this name when it is
complete. Work is divided into parts that depend on the files alone, so any number of workers gives the same bytes, and
a killed job continues with the unfinished parts. The text is streamed (to curate, to train the tokenizer on a sample,
to tokenize): memory depends on the largest document and the sample, not on the corpus.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from bessemer.data.curate.corpus import RULES_VERSION, Corpus, PartState, delete_stale_files
from bessemer.data.curate.engine import CurationEngine, LocalEngine, Meter, ProcessPool, Say, available_cores
from bessemer.data.curate.ledger import byte_length, explain_full_disk, hash_text, read_cached, read_json, write_json
from bessemer.data.curate.passes import Census, ValidationSplit
from bessemer.data.curate.report import PAGE, QUARANTINE, REPORT, format_some, utf8_warning, write_report
from bessemer.data.curate.step import make_step, step_identity
from bessemer.data.read import FileEntry, list_files
from bessemer.data.read.secrets import redact
from bessemer.data.store.format import FORMAT_VERSION, damage_error, file_digest, repair_hint
from bessemer.data.store.remote import ShardCache, Transfer, open_remote
from bessemer.data.store.token_store import TokenStore, open_stores, shard_prefixes
from bessemer.data.store.writer import merge
from bessemer.data.tokenizer.chat import read_template, special_tokens
from bessemer.data.tokenizer.encode import TokenizeTask, is_part_intact, part_mark, part_prefix, tokenize_part
from bessemer.data.tokenizer.tokenizer import DEFAULT_EOS, Tokenizer, cut
from bessemer.errors import UserError
from bessemer.spec.quantity import human_bytes
from bessemer.storage import atomic_path, commit_folder, lock_file, sync_path

if TYPE_CHECKING:
    from bessemer.spec.classify import ClassifySpec
    from bessemer.spec.data import DataSpec, TokenizerSpec

PREPARED = "prepared.json"
REMOTE = "remote.json"  # in a mirror of published data: the address of its shards
TOKENIZER = "tokenizer.json"
_SAMPLE_PIECE_CHARS = 1 << 14  # the tokenizer's sample consists of pieces of long documents
_SAMPLE_SPREAD = 16  # at most this multiple of its share of the sample is read from each part
_POOL_BYTES = 32 << 20  # starting processes takes longer than reading less than this


@dataclass(frozen=True)
class Prepared:
    """The tokenizer and the open stores. A source with a single document has no validation store."""

    tokenizer: Tokenizer
    train: dict[str, TokenStore]
    validation: dict[str, TokenStore]
    folder: Path
    verifiable: bool = True  # False: prepared by an earlier version, without digests
    notes: tuple[str, ...] = ()  # for the user: splits that are not read, damage that was repaired
    url: str = ""  # of published data, whose shards are fetched when they are read
    settings: dict[str, Any] = field(default_factory=dict)  # that published data was prepared with


@dataclass(frozen=True)
class _Source:
    """Totals of a source's curated documents. Those whose hash is below `limit` are held out."""

    text_bytes: int
    documents: int
    held_out: int
    limit: int


def prepare(
    data: DataSpec,
    tokenizer: TokenizerSpec,
    cache: Path,
    vocab: int,
    seed: int,
    progress: Say | None = None,
    engine: CurationEngine | None = None,
    labels: ClassifySpec | None = None,
) -> Prepared:
    """The stores of all sources, from the cache if nothing they depend on has changed.

    `vocab` is the size of the tokenizer to train if `tokenizer.path` is not set; with `labels` every row has a label. A
    kill at any moment leaves nothing that a later call takes for complete. Processes that prepare the same data wait
    for the first.
    """
    cache = Path(cache).absolute()
    notes: list[str] = []
    files = list_sources(data, notes.append)
    loaded = load_tokenizer(data, tokenizer)
    folder = cache / _fingerprint(data, files, tokenizer, loaded, vocab, seed, labels)
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        meter = Meter(progress)
        with _lock_entry(cache, folder.name, meter.say) as alone:
            delete_stale_files(cache)
            if not folder.exists():
                total_bytes = sum(entry.size_bytes for entries in files.values() for entry in entries)
                chosen = engine or (
                    ProcessPool(available_cores())
                    if total_bytes > _POOL_BYTES and available_cores() > 1
                    else LocalEngine()
                )
                work = folder.with_name(f"{folder.name}.partial" + ("" if alone else f"-{uuid.uuid4().hex[:8]}"))
                try:
                    with explain_full_disk(cache):
                        if not (work / PREPARED).exists():
                            job = _Job(data, tokenizer, loaded, vocab, seed, cache, files, chosen, meter, work, labels)
                            job.build()
                            notes += job.corpus.notes
                        _commit(work, folder)
                finally:
                    if engine is None:
                        chosen.close()
    prepared = open_prepared(folder)
    report = read_cached(folder / REPORT, ["sources"]) or {"sources": {}}
    notes += [
        utf8_warning(name, source["undecodable"], source["undecodable_files"])
        for name, source in report["sources"].items()
        if source.get("undecodable")  # older reports lack it
    ]
    if not prepared.verifiable:
        notes.append(
            f"{folder} was prepared by an earlier version, without digests: damage to it would not be noticed. "
            f"`bessemer data verify {folder} --add-digests` checks it and adds them"
        )
    return replace(prepared, notes=tuple(notes))


@contextlib.contextmanager
def _lock_entry(cache: Path, name: str, say: Say) -> Iterator[bool]:
    """Holds the lock of one cache entry. Yields False if the file system has no locks: then two processes may do the
    same work, and the first to finish wins."""
    with open(cache / f".{name}.lock", "w") as file:
        has_locks = True
        try:
            if not lock_file(file, wait=False):
                say("waiting for another process that prepares the same data")
                lock_file(file)
        except OSError:
            has_locks = False
        yield has_locks


def prepared_folder(
    data: DataSpec, tokenizer: TokenizerSpec, cache: Path, vocab: int, seed: int, labels: ClassifySpec | None = None
) -> Path:
    """The folder of `prepare`'s result for the current files."""
    name = _fingerprint(data, list_sources(data), tokenizer, load_tokenizer(data, tokenizer), vocab, seed, labels)
    return Path(cache).absolute() / name


def open_prepared(folder: Path) -> Prepared:
    """Opens prepared data, or the mirror of published data, with the tokenizer that is saved there."""
    path, hint = folder / PREPARED, repair_hint(folder)
    try:
        manifest = read_json(path, hint)
        eos, special, train, validation = (manifest[key] for key in ("eos", "special", "train", "validation"))
    except FileNotFoundError:
        if folder.exists():
            raise UserError(f"{path}: missing; {hint}") from None
        raise UserError(
            f"{folder}: the prepared data is gone; `bessemer train` on the same spec prepares it again"
        ) from None
    except (OSError, KeyError) as error:
        raise UserError(f"{path}: damaged ({error}); {hint}") from error
    expected = manifest.get("digests", {}).get(TOKENIZER)
    try:
        tokenizer = Tokenizer.load(folder / TOKENIZER, eos, special)
    except UserError as error:
        raise UserError(f"{error}; {hint}") from error
    if expected is not None and file_digest(str(folder / TOKENIZER)) != expected:
        raise UserError(f"{folder / TOKENIZER}: is not what {PREPARED} says was written; {hint}")
    shards, url = {"train": train, "validation": validation}, ""
    if (folder / REMOTE).exists():
        remote = read_json(folder / REMOTE, "delete it and start the run again")
        url = remote["url"]
        cache = ShardCache(folder.parent / "shards", remote["cache_bytes"], Transfer(remote["storage"]))
        stores = {side: {name: open_remote(f"{url}/{name}.{side}", cache) for name in shards[side]} for side in shards}
    else:
        stores = {side: open_stores(folder, shards[side], side) for side in shards}
    if "stores" in manifest:
        _check_stores(stores, manifest["stores"], path)
    return Prepared(
        tokenizer, stores["train"], stores["validation"], folder, "stores" in manifest, url=url,
        settings=manifest.get("settings", {}),
    )  # fmt: skip


def _check_stores(stores: dict[str, dict[str, TokenStore]], expected: dict[str, Any], path: Path) -> None:
    """Checks that every shard is the one that `prepared.json` names."""
    for side, sources in stores.items():
        for name, store in sources.items():
            for prefix, info, digest in zip(store.prefixes, store.infos, expected[side][name], strict=True):
                if info.digest != digest:
                    if store.cache:
                        raise UserError(f"{redact(prefix)}: is not the shard that {PREPARED} names; publish it again")
                    raise damage_error(prefix, "json", f"is not the one that {path} names")


def digests_of(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The digests of the other files, for `prepared.json`."""
    names = [TOKENIZER, REPORT, PAGE, QUARANTINE]
    stores = {side: open_stores(folder, manifest[side], side) for side in ("train", "validation")}
    return {
        "digests": {name: file_digest(str(folder / name)) for name in names if (folder / name).exists()},
        "stores": {
            side: {name: [info.digest for info in store.infos] for name, store in sources.items()}
            for side, sources in stores.items()
        },
    }


def chat_template(tokenizer: TokenizerSpec) -> str:
    """The name of a built-in layout, or the text of a Jinja file."""
    path = os.path.expanduser(tokenizer.chat)
    return read_template(tokenizer.chat, ()) if os.path.isfile(path) else tokenizer.chat


def special_tokens_of(data: DataSpec, tokenizer: TokenizerSpec) -> list[str]:
    """The special tokens that the spec declares, and those that the layout of its conversations needs."""
    chats = any(source.is_chat for source in data.sources.values())
    return list(dict.fromkeys([*tokenizer.special, *(special_tokens(tokenizer.chat) if chats else ())]))


def load_tokenizer(data: DataSpec, tokenizer: TokenizerSpec) -> Tokenizer | None:
    """The tokenizer that the spec names, if any."""
    if tokenizer.path is None:
        return None
    special = special_tokens_of(data, tokenizer)
    return Tokenizer.load(tokenizer.path, tokenizer.eos, special, tokenizer.pattern)


def list_sources(data: DataSpec, say: Say | None = None) -> dict[str, list[FileEntry]]:
    """The files of each source. `say` receives which splits of a dataset are read and which entries are skipped."""
    files = {}
    for name, source in data.sources.items():
        skipped: list[str] = []

        def report(line: str, name: str = name) -> None:
            if say:
                say(f"source {name!r}: {line}")

        def add_skipped(path: str, reason: str, skipped: list[str] = skipped) -> None:
            skipped.append(f"{path} is {reason}")

        try:
            files[name] = list_files(source, report, add_skipped)
        except UserError as error:
            raise UserError(f"source {name!r}: {error}") from error
        if skipped:
            report(f"skipped: {format_some(skipped, len(skipped))}; restore these files, or exclude them")
    return files


def _fingerprint(
    data: DataSpec,
    files: dict[str, list[FileEntry]],
    tokenizer: TokenizerSpec,
    loaded: Tokenizer | None,
    vocab: int,
    seed: int,
    labels: ClassifySpec | None = None,
) -> str:
    """A fingerprint of everything that the prepared data depends on: not the weights of the mixture."""
    sources = {
        name: [
            [source.text_field, source.id_field, source.url_field, source.messages_field],
            [entry.identity for entry in files[name]],
            [_step_identity(step) for step in source.clean],
        ]
        for name, source in data.sources.items()
    }
    definition: Any = loaded.fingerprint if loaded else [vocab, tokenizer.model_dump(mode="json")]
    common = [_step_identity(step) for step in data.clean]
    rest = [chat_template(tokenizer), tokenizer.learn, seed, data.validation, data.part, score_label(data)]
    content = [FORMAT_VERSION, RULES_VERSION, sources, common, definition, rest]
    if labels is not None:
        columns = {name: source.columns for name, source in data.sources.items()}
        content.append([columns, labels.model_dump(mode="json", exclude={"pool"})])
    if any(source.has_answers for source in data.sources.values()):
        content.append({name: source.columns for name, source in data.sources.items()})
    more: dict[str, list[str]] = {"ranked": [], "labels": []}
    for name, source in data.sources.items():
        if source.has_answers and "answers" in (source.columns or {}):
            more["ranked"] += [name, source.ranked]
        elif source.has_answers and "label" in (source.columns or {}):
            more["labels"].append(name)
    content += [{key: names} for key, names in more.items() if names]
    if any(source.chat_format for source in data.sources.values()):
        content.append({name: [source.chat_format, source.columns] for name, source in data.sources.items()})
    if weighted := [name for name, source in data.sources.items() if source.message_weights]:
        content.append({"message_weights": weighted})
    return str(xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode()))


def score_label(data: DataSpec) -> str | None:
    """The label that is stored as the documents' score."""
    return data.curriculum.label if data.curriculum.by == "label" else None


def _step_identity(spec: Any) -> list[Any]:
    return [spec.model_dump(mode="json"), *step_identity(make_step(spec, 0))]


def _commit(work: Path, folder: Path) -> None:
    """Removes the intermediate files and gives the complete folder its name. After a kill only this is repeated: the
    parts are not read again, since half of them deleted would look like a smaller corpus."""
    shutil.rmtree(work / "parts", ignore_errors=True)
    for leftover in work.glob("*.tmp"):  # of killed processes
        leftover.unlink()
    try:
        commit_folder(work, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(work)  # without locks, another process was faster, with the same content


def _delete(work: Path) -> None:
    """Deletes the work folder; renamed first, so that a kill leaves nothing to continue from."""
    doomed = work.with_name(f"{work.name}.doomed-{uuid.uuid4().hex[:8]}")
    os.replace(work, doomed)
    shutil.rmtree(doomed)


class _Job:
    """Builds one cache folder."""

    def __init__(
        self,
        data: DataSpec,
        spec: TokenizerSpec,
        loaded: Tokenizer | None,
        vocab: int,
        seed: int,
        cache: Path,
        files: dict[str, list[FileEntry]],
        engine: CurationEngine,
        meter: Meter,
        work: Path,
        labels: ClassifySpec | None = None,
    ) -> None:
        self.labels = labels
        self.data, self.spec, self.loaded, self.vocab, self.seed = data, spec, loaded, vocab, seed
        self.files, self.engine, self.meter, self.work = files, engine, meter, work
        self.special = special_tokens_of(data, spec)
        self.corpus = Corpus(data, files, cache, engine, meter)

    def build(self) -> None:
        """Writes everything to the work folder; `prepared.json`, written last, is the commit."""
        self.work.mkdir(exist_ok=True)
        self.corpus.curate(ValidationSplit(self.seed, self.data.validation))
        sources = {name: self._split(name) for name in self.data.sources}
        if self.data.validation > 0 and not any(source.held_out for source in sources.values()):
            raise UserError(
                "data.validation: no source has two different documents, so none can be held out; "
                "set data.validation to 0 or split the text into several files or rows"
            )
        tokenizer = self._tokenizer(sources)
        self._tokenize(tokenizer, sources)
        if list_sources(self.data) != self.files:
            _delete(self.work)
            raise UserError("files changed while they were read; run again when they are complete")
        manifest: dict[str, Any] = {
            "eos": tokenizer.eos,
            "special": list(tokenizer.special),
            "train": {name: self._merge(name, "train") for name in sources},
            "validation": {name: self._merge(name, "validation") for name in sources if sources[name].held_out},
        }
        write_report(self.work, self.corpus, self._count_tokens(manifest))
        write_json(self.work / PREPARED, manifest | digests_of(self.work, manifest))
        sync_path(self.work)

    def _count_tokens(self, manifest: dict[str, Any]) -> dict[str, dict[str, int]]:
        """Tokens by source and side."""
        sides = {side: open_stores(self.work, manifest[side], side) for side in ("train", "validation")}
        return {
            name: {side: stores[name].tokens for side, stores in sides.items() if name in stores}
            for name in self.data.sources
        }

    def _states(self, name: str) -> list[PartState]:
        return [state for state in self.corpus.parts if state.part.source == name]

    def _split(self, name: str) -> _Source:
        """The hash limit between held-out and training documents; both sides get some if possible."""
        counts = [state.census or Census() for state in self._states(name)]
        documents = sum(count.documents for count in counts)
        text_bytes = sum(count.text_bytes for count in counts)
        held_out = sum(count.held_out for count in counts)
        lowest = min((count.lowest for count in counts), default=0)
        highest = max((count.highest for count in counts), default=0)
        if not documents:
            files = self.files[name]
            read = sum(state.reading.documents for state in self._states(name) if state.reading)
            problem = f"the steps dropped all {read:,} documents" if read else f"no text in {len(files)} files"
            raise UserError(f"source {name!r}: {problem}, the first being {files[0].path}")
        if self.data.validation <= 0 or lowest == highest:  # equal documents stay on one side
            return _Source(text_bytes, documents, 0, 0)
        if held_out == 0:
            return _Source(text_bytes, documents, 1, lowest + 1)
        return _Source(text_bytes, documents, held_out, min(int(self.data.validation * 2**64), highest))

    def _tokenizer(self, sources: dict[str, _Source]) -> Tokenizer:
        path = self.work / TOKENIZER
        eos = self.loaded.eos if self.loaded else self.spec.eos or DEFAULT_EOS
        mark = self.work / "parts" / f"{TOKENIZER}.done"
        if not path.exists() or read_cached(mark) != {"sum": file_digest(str(path))}:
            tokenizer = self.loaded
            if tokenizer is None:
                work = f"training a tokenizer of {self.vocab:,} tokens"
                self.meter.say(f"{work} on at most {human_bytes(self.spec.sample)} of text")
                size = min(self.spec.sample, sum(source.text_bytes for source in sources.values()))
                texts = self.meter.counting(self._sample(sources), f"{work}: reading", size, f"{work}: choosing them")
                tokenizer = Tokenizer.train(texts, self.vocab, eos, kind=self.spec.kind, special=self.special)
            with atomic_path(path, parents=True) as temporary:
                tokenizer.save(temporary)
            write_json(mark, {"sum": file_digest(str(path))})
        return Tokenizer.load(path, eos, self.loaded.special if self.loaded else self.special)

    def _sample(self, sources: dict[str, _Source]) -> Iterator[str]:
        """Training text spread over the corpus, in proportion to the size of the parts.

        Shares are balanced over all parts: if a share is less than a piece, not every part gives one.
        """
        share = min(1.0, self.spec.sample / sum(source.text_bytes for source in sources.values()))
        due = taken = 0.0  # bytes
        for state in self.corpus.parts:
            limit = sources[state.part.source].limit
            part_bytes = state.census.text_bytes if state.census else 0
            readable = part_bytes if share * _SAMPLE_SPREAD >= 1 else share * _SAMPLE_SPREAD * part_bytes
            wanted, seen = share * part_bytes / max(readable, 1), 0
            for _, document in self.corpus.documents(state) if taken <= due + share * part_bytes else ():
                if hash_text(document.text, self.seed) < limit:
                    continue
                for piece in cut(document.text, _SAMPLE_PIECE_CHARS):
                    size = byte_length(piece)
                    if taken <= due + wanted * seen:
                        yield piece
                        taken += size
                    seen += size
                if seen >= readable:
                    break
            due += share * part_bytes

    def _tokenize(self, tokenizer: Tokenizer, sources: dict[str, _Source]) -> None:
        tasks = []
        template, label = chat_template(self.spec), score_label(self.data)
        for i, state in enumerate(self.corpus.parts):
            limit = sources[state.part.source].limit
            task = TokenizeTask(
                state.part, state.source, self.corpus.cache, tuple(state.done), self.work, tokenizer.eos,
                tuple(tokenizer.special), self.seed, limit, i, self.engine.workers == 1, template, self.spec.learn,
                label, self.corpus.copies, self.labels,
            )  # fmt: skip
            tasks.append(task)
        marked = [task for task in tasks if task.mark.exists()]
        if marked:
            self.meter.start("verifying finished parts", sum(task.part.size_bytes for task in marked))
        intact = set()
        for i, good in self.engine.run(is_part_intact, marked):
            self.meter.advance(marked[i].part.size_bytes)
            if good:
                intact.add(marked[i].number)
        tasks = [task for task in tasks if task.number not in intact]
        self.meter.start("tokenizing", sum(task.part.size_bytes for task in tasks))
        for i, _ in self.engine.run(tokenize_part, tasks):
            self.meter.advance(tasks[i].part.size_bytes)

    def _merge(self, name: str, side: str) -> int:
        """Merges the source's part stores into shards; returns their number."""
        parts = [i for i, state in enumerate(self.corpus.parts) if state.part.source == name]
        # By the marks, not by the files: a missing store must be an error.
        having = [i for i in parts if side in read_json(part_mark(self.work, i))]
        return merge([part_prefix(self.work, i, side) for i in having], shard_prefixes(self.work, name, side))
