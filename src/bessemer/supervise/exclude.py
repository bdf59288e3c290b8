"""Documents that trials convicted, in earlier runs or this one, left out of this one."""

from __future__ import annotations

from bessemer.data.bans import banned_documents
from bessemer.data.exclude import FILE_NAME, offers, read_exclusions
from bessemer.data.prepare import list_sources
from bessemer.data.stream import BatchStream
from bessemer.spec.schema import RunSpec
from bessemer.supervise.data import OWN
from bessemer.train.job import Job


def leave_out(job: Job) -> None:
    """Ban what the spec's lists name: from the start in a new run, from here on in one that goes on, so that past steps
    still replay. Entries that no longer fit their file are told and ignored."""
    if not job.spec.data.exclude or not isinstance(job.stream, BatchStream):
        return
    entries = [entry for path in job.spec.data.exclude for entry in read_exclusions(path)]
    found, stale = banned_documents(entries, job.stream.sources)
    position = job.stream.steps.position(job.start_step)
    new = found - set(job.stream.banned)
    if new:
        job.stream = job.stream.replace(banned={**job.stream.banned, **dict.fromkeys(new, position)})
    lists = ", ".join(job.spec.data.exclude)
    job.event("excluded", documents=len(found), reason=f"{len(found)} documents are left out: {lists}")
    for line in stale:
        job.event("exclusion_stale", reason=line)


def offer(spec: RunSpec, job: Job) -> None:
    """Tell of other runs' lists that convict documents of this run's files."""
    if any(source.path == [OWN] for source in spec.data.sources.values()):
        return
    files = {entry.name for entries in list_sources(spec.data).values() for entry in entries}
    for found in offers(files, spec.runs, [*spec.data.exclude, job.run.folder / FILE_NAME]):
        job.event("exclusions_offered", reason=found.line)
